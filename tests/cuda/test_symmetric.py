"""The candidate kernel for symmetric products: right in the interpreter, within budgets for three cards."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.symmetric import TABLE, Tile, kernel, tile_of
from tests.cuda.compilation import _said_by_ptxas
from tests.cuda.symmetric import _wrong

MULTIPLIES = {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 120: r"mma\.sync"}
SHARED = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes of a multiprocessor that blocks can have
REGISTERS = 2**16


@pytest.mark.parametrize("rounds", [pytest.param(6, id="few"), pytest.param(20, id="many", marks=pytest.mark.extended)])
def test_products_and_newton_schulz_are_those_of_float64_and_do_not_depend_on_the_batch(rounds):
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda.symmetric", str(rounds), str(rounds)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert not process.stdout, process.stdout


def test_a_card_would_be_asked_all_questions(tmp_path):
    """Run the part of `make gpu` in the interpreter, where only its first answer means something."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--device", "cpu", "--only", "products"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([*command, "--out", tmp_path / "page.md"], env=environment, capture_output=True, check=True)
    page = (tmp_path / "page.md").read_text()
    assert "| 32 | float16 | 2.6e-04 | = | = |" in page
    assert re.search(r"\*\*(Yes|No): Newton-Schulz is \d+\.\d\d times as fast with the kernel", page)


def test_what_is_wrong_is_seen():
    x = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0)).half()
    right = (x.double() @ x.double().mT).half()
    assert not list(_wrong("X X^T", right, x, x))
    far, nan, uneven = right.clone(), right.clone(), right.clone()
    far[1, 3, 3] *= 1.002  # two units in the last place
    nan[0, 0, 0] = torch.nan
    uneven[0, 1, 2] = torch.nextafter(right[0, 1, 2].float().half(), torch.tensor(torch.inf).half())
    assert "1 of 1152 elements are wrong" in next(_wrong("X X^T", far, x, x))
    assert "1 of 1152 elements are wrong" in next(_wrong("X X^T", nan, x, x))
    assert "not symmetric" in list(_wrong("X X^T", uneven, x, x))[-1]


@dataclasses.dataclass(frozen=True)
class Built:
    """A kernel for one card, with the blocks that a multiprocessor takes at once."""

    spills: int
    blocks: int
    multiplies: int
    copies: int
    atomics: int
    contracted: int


def built(capability: int, tile: Tile, dtype: str, *, adds: bool, turned: bool) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    factor = (tile.depth, tile.side) if turned else (tile.side, tile.depth)
    blocks = [f"tensordesc<{dtype}[1, {rows}, {columns}]>" for rows, columns in (factor, (tile.side, tile.side))]
    kinds = {"alpha": "fp32", "beta": "fp32", "n": "i32", "length": "i32"}
    constants = {"side": tile.side, "depth": tile.depth, "adds": adds, "turned": turned}
    signature = dict(zip("abdc", (blocks[0], *blocks, blocks[1]), strict=True)) | kinds
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    said = _said_by_ptxas(ptx, capability, fma=True)
    (registers,) = map(int, re.findall(r"Used (\d+) registers", said))
    return Built(
        sum(map(int, re.findall(r"(\d+) bytes (?:spill|stack)", said))),
        min(REGISTERS // (-(-registers // 8) * 8 * 32 * tile.warps), SHARED[capability] // compiled.metadata.shared),
        len(re.findall(MULTIPLIES[capability], ptx)),
        len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        len(re.findall(r"\b(?:atom|red)\.", ptx)),
        len(re.findall(r"\bfma\.rn", ptx)),
    )


@pytest.mark.parametrize("capability", TABLE)
def test_two_blocks_share_a_multiprocessor_and_nothing_is_spilled(capability):
    for tile, dtype in itertools.product(TABLE[capability].values(), ("fp16", "bf16")):
        for adds, turned in itertools.product((False, True), repeat=2):
            own = built(capability, tile, dtype, adds=adds, turned=turned)
            assert own.spills == 0
            assert own.blocks >= 2
            assert own.multiplies
            assert own.copies >= 4, "A and B come, and C goes, by TMA"
            assert own.atomics == 0
            assert (own.contracted > 0) == adds, "beta D and the sum are rounded together"


def test_budgets_are_broken_by_a_tile_that_is_too_large_for_its_warps():
    own = built(90, Tile(256, 64, 4, 3), "fp16", adds=True, turned=False)
    assert own.spills > 0
    assert own.blocks < 2


def test_one_binary_serves_all_sizes_and_batches():
    parameters = {parameter.name: parameter for parameter in kernel.params}
    assert parameters["n"].do_not_specialize
    assert parameters["length"].do_not_specialize
    assert {name for name, each in parameters.items() if each.is_constexpr} == {"side", "depth", "adds", "turned"}


def test_a_tile_follows_from_card_size_and_dtype_and_what_is_not_known_is_left_to_cublas():
    assert list(inspect.signature(tile_of).parameters) == ["capability", "size", "dtype"]
    assert tile_of(90, 1024, torch.float16) == tile_of(90, 8192, torch.bfloat16) == Tile(128, 64, 8, 3)
    for capability, size, dtype in (
        (80, 1024, torch.float16),
        (90, 256, torch.float16),
        (90, 1028, torch.float16),
        (90, 1024, torch.float32),
    ):
        assert tile_of(capability, size, dtype) is None
