"""Check the candidate kernel for symmetric products in Triton's interpreter, on a CPU.

python -m tests.cuda.symmetric SEED ROUNDS     with TRITON_INTERPRET=1; a line for each thing that is wrong
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from benchmarks.symmetric import Products, Tile, multiplying
from hf_muon.math.coefficients import resolve
from hf_muon.math.newton_schulz import newton_schulz
from tests.cuda.interpreter import nearest_bf16

TILES = [Tile(16, 16, 4, 2), Tile(32, 16, 4, 2), Tile(64, 32, 4, 2)]
DTYPES = [torch.float16, torch.bfloat16]


def main(seed: int, rounds: int) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)

    def among(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    with nearest_bf16():
        for _ in range(rounds):
            dtype, tile, tall = DTYPES[among(2)], TILES[among(3)], bool(among(2))
            shape = (1 + among(4), 8 * (1 + among(20)), 8 * (1 + among(20)))
            gaps = 8 * among(2)
            name = f"{shape} {dtype} {tile} {'tall' if tall else 'wide'}, {gaps} between rows"
            x = torch.randn(shape, generator=generator).div_(shape[-1] ** 0.5)
            x = (x.mT.contiguous().mT if tall else x).to(dtype)
            for line in wrong_products(x, Products(tile), gaps):
                print(f"{name}: {line}", flush=True)
        for shape in ((3, 40, 88), (3, 136, 40), (3, 72, 72)):
            for dtype in DTYPES:
                x = torch.randn(shape, generator=generator) @ torch.diag(torch.logspace(0, -2, shape[-1]))
                for line in wrong_newton_schulz(x, dtype):
                    print(f"Newton-Schulz of {shape} in {dtype}: {line}", flush=True)


def wrong_products(x: Tensor, products: Products, gaps: int) -> Iterator[str]:
    """Yield what is wrong with products of ``(B, s, l)``: values, symmetry, or bits that depend on the batch."""

    def memory() -> Tensor:
        count, size, _ = x.shape
        return x.new_full((count, size, size + gaps), torch.nan)[..., :size]

    gram = products(memory(), x, x)
    yield from _wrong("X X^T", gram, x, x)
    first = products(memory()[:1], x[:1], x[:1])
    if not torch.equal(first, gram[:1]):
        yield "X X^T: other bits alone than in a batch"
    polynomial = products(memory(), gram, gram, add=gram, beta=-1.75, alpha=0.5)
    yield from _wrong("b R + c R^2", polynomial, gram, gram, gram, -1.75, 0.5)
    into_itself = gram.clone()
    products(into_itself, gram, gram, add=into_itself, beta=-1.75, alpha=0.5)
    if not torch.equal(into_itself, polynomial):
        yield "b R + c R^2: other bits in the memory of its addend"
    yield from _wrong("A Z", products(memory(), gram, polynomial), gram, polynomial)


def _wrong(
    name: str, result: Tensor, a: Tensor, b: Tensor, add: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Iterator[str]:
    """Yield what is wrong with a result: more than one rounding of it, and of fp32 sums."""
    a, b = a.double(), b.double()
    exact, terms = alpha * (a @ b.mT), abs(alpha) * (a.abs() @ b.abs().mT)
    if add is not None:
        exact, terms = exact + beta * add.double(), terms + abs(beta) * add.double().abs()
    if name == "A Z":  # which is symmetric but for the roundings of its factors
        exact = exact.tril() + exact.tril(-1).mT
    allowed = 0.51 * torch.finfo(result.dtype).eps * exact.abs() + 2.0**-21 * terms + 2.0**-25
    off = (result.double() - exact).abs()
    if not (off <= allowed).all():  # or NaN
        yield f"{name}: {int((~(off <= allowed)).sum())} of {off.numel()} elements are wrong, by up to {off.max():.3g}"
    if not torch.equal(result, result.mT):
        yield f"{name}: not symmetric"


def wrong_newton_schulz(x: Tensor, dtype: torch.dtype) -> Iterator[str]:
    """Yield what is wrong with directions ``(3, m, n)`` of the kernel's products, compared with those of torch's."""
    coefficients = resolve("polar_express", 5)
    exact = newton_schulz(x.double(), coefficients, torch.float64)
    torchs = (newton_schulz(x, coefficients, dtype).double() - exact).norm()
    with multiplying(TILES[1]) as products:
        own = newton_schulz(x, coefficients, dtype)
        alone = newton_schulz(x[1:2], coefficients, dtype)
    if not products.calls:
        yield "the kernel was not called"
    if not (own.double() - exact).norm() <= 1.1 * torchs:
        yield f"an error of {(own.double() - exact).norm():.3g}, where torch's products have {torchs:.3g}"
    if not torch.equal(alone, own[1:2]):
        yield "other bits alone than in a batch"


if __name__ == "__main__":
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        main(*map(int, sys.argv[1:]))
