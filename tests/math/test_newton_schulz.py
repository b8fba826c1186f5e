"""Newton-Schulz beside polynomials of the singular values of a float64 SVD: presets, forms, dtypes and scales; what it
costs beside counted FLOPs and bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_muon import MuonConfig, orthogonalize
from hf_muon.math import cost
from hf_muon.math.coefficients import AUTO, PRESETS, resolve
from hf_muon.math.cost import Form, form
from hf_muon.math.newton_schulz import newton_schulz, newton_schulz_in_batches
from hf_muon.math.precision import compute_dtype
from hf_muon.math.products import symmetric_
from tests.support.accelerated import accelerated, sized
from tests.support.live_bytes import LiveBytes
from tests.support.reference import newton_schulz_on_singular_values, normalized, polar_factor

# Forms and block sizes that small matrices would not choose themselves.
STANDARD = (1, 1, 1, 1, 1)
WAYS = [
    Form(STANDARD, 5, 3),
    Form((3, 2), 40, 40),
    Form((3, 2), 5, 4),
    Form((2, 2, 1), 40, 40),
    Form((2, 2, 1), 3, 3),
    Form((1, 2, 2), 4, 7),
]
POLAR_EXPRESS = resolve("polar_express", 5)
PATHS = {"cpu": contextlib.nullcontext, "accelerator": accelerated}


# --- the values


# Rounding to the dtype of the result sets the tolerance; bf16 products leave an error of about 1.5e-2.
@pytest.mark.parametrize(
    ("dtype", "ns_dtype", "tolerance"),
    [
        (torch.float32, "fp32", 1e-4),
        (torch.float64, "fp32", 1e-4),
        (torch.float16, "fp32", 5e-4),
        (torch.bfloat16, "fp32", 3e-3),
        *((dtype, "bf16", 3e-2) for dtype in (torch.float64, torch.float16, torch.bfloat16)),
    ],
)
def test_the_polynomials_are_applied_to_the_singular_values(dtype, ns_dtype, tolerance):
    for shape in ((64, 64), (32, 96), (800, 16), (127, 61), (3, 48, 20)):
        matrix = torch.randn(shape).to(dtype)
        before = matrix.clone()
        for preset in PRESETS if ns_dtype == "fp32" else ["polar_express"]:
            expected = newton_schulz_on_singular_values(matrix, resolve(preset))
            result = orthogonalize(matrix, ns_coefficients=preset, ns_dtype=ns_dtype)
            assert result.dtype is dtype
            assert (result.double() - expected).norm() < tolerance * expected.norm(), preset
        assert torch.equal(matrix, before), "the input is not written to"


@pytest.mark.parametrize("way", [*WAYS, None], ids=str)
@given(
    batch=st.integers(1, 3),
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    rank=st.integers(1, 40),
    exponent=st.integers(-60, 60),
    preset=st.sampled_from(sorted(PRESETS)),
    path=st.sampled_from(sorted(PATHS)),
    seed=st.integers(0, 2**20),
)
def test_every_way_gives_the_polynomials(way, batch, m, n, rank, exponent, preset, path, seed):
    """In fp64, where nothing is lost to rounding; a scale that is a power of two does not change a bit."""
    torch.manual_seed(seed)
    coefficients = resolve(preset)[:5]
    matrices = torch.randn(batch, m, rank, dtype=torch.float64) @ torch.randn(batch, rank, n, dtype=torch.float64)

    def orthogonalized(matrices, dtype=torch.float64, out=None):
        with PATHS[path]():
            return newton_schulz(matrices, coefficients, dtype, form=way, out=out)

    expected = newton_schulz_on_singular_values(matrices, coefficients)
    result = orthogonalized(matrices)
    assert (result - expected).abs().max() < 1e-7
    assert (result - orthogonalized(matrices.mT).mT).abs().max() < 1e-7
    out = torch.full_like(matrices, torch.nan)
    assert orthogonalized(matrices * 2.0**exponent, out=out) is out
    assert torch.equal(out, result)
    in_fp32 = orthogonalized(matrices.float(), torch.float32)
    # Five steps amplify rounding noise of 1e-7 in the smallest directions by up to 2000.
    assert (in_fp32 - expected).norm() < 2e-2 * expected.norm()
    assert torch.equal(orthogonalized(matrices.float() * 2.0**exponent, torch.float32), in_fp32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 7, 12, 100])
def test_symmetric_products(rows, tall, dtype, tolerance):
    """Also of transposed matrices, into a part of the memory, whose rest stays as it is, and in place."""
    x = torch.randn(2, 12, 20).to(dtype)
    x = x.mT.contiguous().mT if tall else x
    addend = torch.randn(2, 12, 12) / 8
    addend = (addend + addend.mT).to(dtype)
    memory = torch.full((2, 12, 28), torch.nan, dtype=dtype)
    memory[..., 12:24] = addend
    out, copy = memory[..., :12], memory[..., 12:24]
    for into, alpha, beta, add in ((out, 1.0, 1.0, None), (out, -2.0, 0.5, addend), (copy, -2.0, 0.5, copy)):
        expected = alpha * (x.double() @ x.double().mT) + (0 if add is None else beta * add.double())
        result = symmetric_(into, x, x.mT, add=add, beta=beta, alpha=alpha, rows=rows)
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
        assert memory[..., 24:].isnan().all()


# --- coefficients and their ranges


def test_ranges_are_what_the_coefficients_give_and_the_docs_say():
    """Also for the values of others on the page, as `optim_args` reads them."""
    page = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| .+ \| `([^`]+)` \| (\d+) \| ([\d.]+) to ([\d.]+) \|$", page, re.M)
    assert {name: preset.singular_range for name, preset in PRESETS.items()}.items() <= {
        value: (float(low), float(high)) for value, _, low, high in rows
    }.items()
    assert len(rows) == len(PRESETS) + 3
    for value, count, low, high in rows:
        given = MuonConfig.from_mapping({"ns_coefficients": value.replace("\\", "")}).ns_coefficients
        result = torch.logspace(-3, 0, 20001, dtype=torch.float64)
        assert len(resolve(given)) == int(count)
        for a, b, c in resolve(given):
            result = a * result + b * result**3 + c * result**5
        assert float(low) <= result.min() <= float(low) + 1e-2
        assert result.max() <= float(high)


class TensorCores(TorchDispatchMode):
    """Computes products of fp16 as tensor cores do: exact products, sums in fp32, one rounding."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        if name not in ("aten::bmm", "aten::baddbmm") or args[0].dtype is not torch.float16:
            return function(*args, **kwargs)
        total = kwargs.get("alpha", 1) * torch.bmm(args[-2].float(), args[-1].float())
        if name == "aten::baddbmm":
            total = kwargs.get("beta", 1) * args[0].float() + total
        return kwargs["out"].copy_(total)


# In each dtype the standard form, and but for bf16, which keeps it, the Gram form.
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *itertools.product([torch.float32, torch.bfloat16], [(64, 64), (61, 127), (256, 64)]),
        *itertools.product([torch.float16], [(64, 128), (400, 256)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", PRESETS)
def test_singular_values_stay_in_the_range_of_the_preset(preset, dtype, shape):
    """The range holds for inputs from 1e-3 to 1. fp16 takes the paths of accelerators, and sums as they do."""
    below, above = {torch.float32: (2e-3, 2e-3), torch.float16: (2e-2, 2e-3), torch.bfloat16: (6e-2, 6e-2)}[dtype]
    least, short = 1e-3 if dtype is torch.float32 else 1e-2, min(shape)

    u, v = (torch.linalg.qr(torch.randn(size, short, dtype=torch.float64)).Q for size in shape)
    steep, spiked = torch.logspace(math.log10(least), 0, short), torch.tensor([1.0] * 3 + [1e-2] * (short - 3))
    uneven = torch.randn(shape) * torch.logspace(-3, 0, shape[0]).view(-1, 1)
    given = [((u * values) @ v.T).float() for values in (steep, spiked)]
    low, high = PRESETS[preset].singular_range
    for matrix in (torch.randn(shape), *given, uneven, 1 + 0.01 * torch.randn(shape)):
        with contextlib.ExitStack() as stack:
            for path in (accelerated(), TensorCores()) if dtype is torch.float16 else ():
                stack.enter_context(path)
            direction = newton_schulz(matrix.unsqueeze(0), resolve(preset), dtype)[0].double()
        u, values, vh = torch.linalg.svd(normalized(matrix), full_matrices=False)
        stretches = (u.mT @ direction @ vh.mT).diagonal()[values >= least]
        assert stretches.min() >= low - below
        assert torch.linalg.svdvals(direction).max() <= high + above


def test_polar_express_with_many_steps_is_the_polar_factor():
    for shape in ((48, 48), (96, 32), (4, 20, 60)):
        matrix = torch.randn(shape)
        result = orthogonalize(matrix, ns_steps=10, ns_dtype="fp32")
        assert (result - polar_factor(matrix)).abs().max() < 1e-4


def test_a_list_has_the_coefficients_of_each_step_and_their_number():
    matrix = torch.randn(24, 40)
    for name, preset in PRESETS.items():
        assert len(resolve(name)) == len(resolve(name, AUTO)) == 5
        steps = len(preset.steps)
        expected = orthogonalize(matrix, ns_coefficients=name, ns_steps=steps, ns_dtype="fp32")
        for options in ({}, {"ns_steps": steps}):
            result = orthogonalize(matrix, ns_coefficients=preset.steps, ns_dtype="fp32", **options)
            assert torch.equal(result, expected)
    assert resolve((1.5, -0.5, 0.0)) == ((1.5, -0.5, 0.0),) * 5
    assert len(resolve(((1.5, -0.5, 0.0),) * 7)) == len(resolve("original", 7)) == 7


# --- scales and other inputs


@pytest.mark.parametrize("path", PATHS)
def test_directions_do_not_depend_on_the_scale(path):
    """Down to the least number of fp32, and up to norms that it does not have; each matrix of a batch has its own."""
    matrix = torch.randint(-100, 101, (2, 40, 60)).float()  # keeps its bits among subnormal numbers
    exponents = torch.tensor([-149.0, -140, -126, -100, -60, 60, 100, 120]).view(8, 1, 1)
    with PATHS[path]():
        expected = orthogonalize(matrix, ns_dtype="fp32")
        assert expected.abs().max() > 0.1
        for exponent in exponents:
            assert torch.equal(orthogonalize(torch.ldexp(matrix, exponent), ns_dtype="fp32"), expected)
        batch = torch.cat([torch.ldexp(matrix[:1].expand(8, 40, 60), exponents), torch.zeros(1, 40, 60)])
        *results, zeros = orthogonalize(batch, ns_dtype="fp32")
    for result in results:
        torch.testing.assert_close(result, expected[0], rtol=0, atol=1e-5)
    assert not zeros.any()


@pytest.mark.parametrize("transform", [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x.expand(3, *x.shape)])
def test_strides_and_autocast_do_not_matter(transform):
    matrix = transform(torch.randn(20, 36))
    expected = orthogonalize(matrix.contiguous(), ns_dtype="fp32")
    assert torch.equal(orthogonalize(matrix, ns_dtype="fp32"), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(orthogonalize(matrix, ns_dtype="fp32"), expected)


def test_zeros_and_empty_matrices():
    for preset, ns_dtype in itertools.product(PRESETS, ("fp32", "bf16")):
        zeros = torch.zeros(5, 7)
        assert torch.equal(orthogonalize(zeros, ns_dtype=ns_dtype, ns_coefficients=preset), zeros)
    for shape in ((0, 4, 5), (0, 5)):
        assert orthogonalize(torch.empty(shape)).shape == shape


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiles_into_one_graph():
    compiled = torch.compile(orthogonalize, backend="aot_eager", fullgraph=True)
    matrix = torch.randn(1, 400, 640)  # which without compilation multiplies in blocks
    assert (compiled(matrix, ns_dtype="fp32") - orthogonalize(matrix, ns_dtype="fp32")).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(256, 256), (100, 50)])
@pytest.mark.parametrize("shape", [(2, 256, 256), (2, 256, 1024)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)], ids=str
)
def test_gpu_gives_the_polynomials_without_synchronization_and_in_a_graph(shape, dtype, tolerance, rows):
    matrices = torch.randn(shape, device="cuda")
    expected = newton_schulz_on_singular_values(matrices, POLAR_EXPRESS)
    way = Form(form(shape, 5, dtype).lengths, *rows)
    result = newton_schulz(matrices, POLAR_EXPRESS, dtype, form=way)
    assert (result.double() - expected).norm() < tolerance * expected.norm()
    torch.cuda.set_sync_debug_mode("error")
    try:
        newton_schulz(matrices, POLAR_EXPRESS, dtype, form=way)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = newton_schulz(matrices, POLAR_EXPRESS, dtype, form=way)
    graph.replay()
    assert torch.equal(captured, result)


# --- how it is computed, by shape, dtype and device, and what that costs


@pytest.mark.parametrize(
    ("device", "facts", "expected"),
    [
        ("cpu", "avx512_f", torch.float32),
        ("cpu", "avx512_bf16", torch.bfloat16),
        ("cpu", "amx_bf16", torch.bfloat16),
        ("cuda", (None, (9, 0)), torch.float16),
        ("cuda", (None, (7, 0)), torch.float16),
        ("cuda", (None, (6, 1)), torch.float32),
        ("cuda", ("6.2", (9, 4)), torch.bfloat16),
    ],
)
def test_auto_is_what_a_processor_multiplies_fast(device, facts, expected, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {facts: True}, raising=False)
    else:
        monkeypatch.setattr(torch.version, "hip", facts[0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: facts[1])
    try:
        compute_dtype.cache_clear()
        assert compute_dtype("auto", device, *([0] if device == "cuda" else [])) is expected
    finally:
        compute_dtype.cache_clear()


def test_the_form_depends_on_the_shape_and_the_dtype_and_has_the_fewest_flops():
    for dtype, least in ((torch.float32, 64), (torch.float16, 256)):
        for short, long in ((least, 3 * least // 2 + 1), (least, 4096)):
            for shape in ((short, long), (long, short), (3, short, long)):
                assert form(shape, 5, dtype).lengths == (3, 2)
                assert form(shape, 5, torch.bfloat16).lengths == STANDARD
        for shape in ((least, 3 * least // 2), (3 * least // 2, least), (least - 1, 4096), (4096, 4096)):
            assert form(shape, 5, dtype).lengths == STANDARD
    for steps in range(1, 12):
        assert sum(form((64, 256), steps, torch.float32).lengths) == steps
    for long in (64, 80, 95, 96, 97, 128, 4096):
        chosen = cost.flops((64, long), form((64, long), 5, torch.float32))
        others = [Form(lengths, 64, 64) for lengths in (STANDARD, (2, 2, 1), (3, 2))]
        assert chosen == min(cost.flops((64, long), other) for other in others)


def test_blocks_are_of_large_matrices_on_a_cpu():
    for dtype, least in ((torch.float32, 256), (torch.bfloat16, 512), (torch.float16, 4096)):
        assert form((least - 1, 5000), 5, dtype, "cpu")[1:] == (least - 1, least - 1)
        assert form((least, 5000), 5, dtype, "cuda")[1:] == (least, least)
        for size in (least, 3 * least + 5):
            for rows in form((size, 20000), 5, dtype, "cpu")[1:]:
                assert rows < size
                assert rows % 16 == 0, "rows that a processor adds at once"
                assert -(-size // rows) <= 12, "more blocks would spend their time in calls"


@pytest.mark.parametrize("way", [*WAYS, Form(STANDARD, 40, 40), Form((4, 1), 40, 40)], ids=str)
def test_flops_are_counted_as_they_are(way):
    for shape in ((12, 31), (20, 20), (31, 7)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(2, *shape), POLAR_EXPRESS, torch.float32, form=way)
        assert counter.get_total_flops() == 2 * cost.flops(shape, way)


@pytest.mark.parametrize("shape", [(7, 12, 20), (7, 20, 64), (7, 64, 128), (5, 60, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_within_the_limit(shape, dtype):
    """A batch of two comes out as its two would together, takes no more memory, and does not write to its input."""
    matrices, count = torch.randn(shape), shape[0]
    each = cost.working_bytes(shape, form(shape, 5, dtype, "cpu"), dtype)
    whole = newton_schulz(matrices, POLAR_EXPRESS, dtype)
    for limit, size in ((1, 1), (2 * each, 2), (3 * each - 1, 2), (count * each, count)):
        expected = torch.cat([newton_schulz(part, POLAR_EXPRESS, dtype) for part in matrices.split(size)])
        assert (expected - whole).abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-5)
        options = {"coefficients": POLAR_EXPRESS, "dtype": dtype}
        with LiveBytes() as memory:
            assert torch.equal(newton_schulz_in_batches(matrices, **options, max_batch_bytes=limit), expected)
        assert memory.peak < matrices.numel() * dtype.itemsize + size * each + 1000
        with mock.patch.object(cost, "_MOST_BYTES", {"cpu": limit}):  # what stays in the caches bounds it as well
            assert torch.equal(newton_schulz_in_batches(matrices, **options), expected)
        for path, own in itertools.product(PATHS.values(), (matrices, matrices.bfloat16())):
            with path():  # in the memory of the input, too
                results = [
                    newton_schulz_in_batches(own.clone(), **options, max_batch_bytes=limit, overwrite=overwrite)
                    for overwrite in (True, False)
                ]
                assert torch.equal(*results)


@pytest.mark.parametrize("shape", [(1, 64, 64), (2, 64, 160), (2, 160, 64), (1, 400, 640), (1, 520, 530)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_as_computed(shape, dtype):
    matrices = torch.randn(shape)
    expected = shape[0] * cost.working_bytes(shape, form(shape, 5, dtype, "cpu"), dtype)
    with LiveBytes() as memory:
        newton_schulz(matrices, POLAR_EXPRESS, dtype)
    # The slack is one identity for the whole batch, and a few scalars for each matrix.
    assert expected - 1000 < memory.peak < expected + min(shape[1:]) ** 2 * dtype.itemsize + 1000


def test_an_accelerator_copies_no_batch_where_nothing_is_compiled():
    matrices = torch.randn(64, 50, 80)
    each = cost.working_bytes((50, 80), Form(STANDARD, 50, 50), torch.bfloat16)
    with sized(chunk=4000), accelerated(), LiveBytes() as live:
        newton_schulz(matrices, POLAR_EXPRESS, torch.bfloat16)
    assert live.peak <= 64 * each + 4 * 8 * 50 * 80  # a few matrices in fp64
