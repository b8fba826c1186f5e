"""Newton-Schulz beside polynomials of the singular values of a float64 SVD: presets, forms, dtypes and scales."""

from __future__ import annotations

import contextlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_muon import orthogonalize
from hf_muon.math import cost
from hf_muon.math.coefficients import AUTO, PRESETS, resolve
from hf_muon.math.newton_schulz import newton_schulz
from hf_muon.math.products import symmetric_
from tests.accelerated import accelerated
from tests.math.ways import CHOSEN, WAYS, lengths_of
from tests.reference import newton_schulz_on_singular_values, normalized, polar_factor


def spectrum(matrix):
    return torch.linalg.svdvals(matrix.double())


def with_spectrum(m, n, values):
    """Return a random fp64 matrix with these singular values."""
    u, v = (torch.linalg.qr(torch.randn(size, min(m, n), dtype=torch.float64)).Q for size in (m, n))
    return (u * values) @ v.T


# --- The values


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
@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (800, 16), (127, 61), (3, 48, 20)], ids=str)
def test_the_polynomials_are_applied_to_the_singular_values(shape, dtype, ns_dtype, tolerance):
    matrix = torch.randn(shape).to(dtype)
    before = matrix.clone()
    for preset in PRESETS if ns_dtype == "fp32" else ["polar_express"]:
        expected = newton_schulz_on_singular_values(matrix, resolve(preset))
        result = orthogonalize(matrix, ns_coefficients=preset, ns_dtype=ns_dtype)
        assert result.dtype is dtype
        assert (result.double() - expected).norm() < tolerance * expected.norm(), preset
    assert torch.equal(matrix, before), "the input is not written to"


@pytest.mark.parametrize("way", [*WAYS, CHOSEN], ids=str)
@given(
    batch=st.integers(1, 3),
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    rank=st.integers(1, 40),
    exponent=st.integers(-60, 60),
    preset=st.sampled_from(sorted(PRESETS)),
    accelerator=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_every_way_gives_the_polynomials(way, batch, m, n, rank, exponent, preset, accelerator, seed):
    """In fp64, where nothing is lost to rounding; a scale that is a power of two does not change a bit."""
    torch.manual_seed(seed)
    coefficients = resolve(preset)
    lengths = lengths_of(way.lengths, len(coefficients))
    matrices = torch.randn(batch, m, rank, dtype=torch.float64) @ torch.randn(batch, rank, n, dtype=torch.float64)

    def orthogonalized(matrices, dtype=torch.float64):
        with accelerated() if accelerator else contextlib.nullcontext():
            return newton_schulz(matrices, coefficients, dtype, lengths=lengths, rows=way.rows)

    expected = newton_schulz_on_singular_values(matrices, coefficients)
    result = orthogonalized(matrices)
    assert (result - expected).abs().max() < 1e-7
    assert (result - orthogonalized(matrices.mT).mT).abs().max() < 1e-7
    assert torch.equal(orthogonalized(matrices * 2.0**exponent), result)
    in_fp32 = orthogonalized(matrices.float(), torch.float32)
    # Five steps amplify rounding noise of 1e-7 in the smallest directions by up to 2000, and ten by more.
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


# --- Coefficients and their ranges


def test_ranges_are_what_the_coefficients_give_and_the_docs_say():
    page = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
    values = torch.logspace(-3, 0, 20001, dtype=torch.float64)
    for name, preset in PRESETS.items():
        low, high = preset.singular_range
        assert f"| `{name}` | {preset.default_steps} | {low:.3f} to {high:.3f} |" in page
        for steps, bounds in ((AUTO, preset.singular_range), (4, preset.singular_range_of_four)):
            if bounds is None:
                continue
            result = values.clone()
            for a, b, c in resolve(name, steps):
                result = a * result + b * result**3 + c * result**5
            assert bounds[0] <= result.min() <= bounds[0] + 1e-2
            assert result.max() <= bounds[1]


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
        *itertools.product([torch.float32, torch.bfloat16], [(64, 64), (160, 40), (61, 127), (64, 256)]),
        *itertools.product([torch.float16], [(64, 128), (256, 256), (256, 400), (400, 256)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", PRESETS)
def test_singular_values_stay_in_the_range_of_the_preset(preset, dtype, shape):
    """The range holds for inputs from 1e-3 to 1. fp16 takes the paths of accelerators, and sums as they do."""
    below, above = {torch.float32: (2e-3, 2e-3), torch.float16: (2e-2, 2e-3), torch.bfloat16: (6e-2, 6e-2)}[dtype]
    least, short = 1e-3 if dtype is torch.float32 else 1e-2, min(shape)
    steep = with_spectrum(*shape, torch.logspace(math.log10(least), 0, short, dtype=torch.float64))
    spiked = with_spectrum(*shape, torch.tensor([1.0] * 3 + [1e-2] * (short - 3), dtype=torch.float64))
    uneven = torch.randn(shape) * torch.logspace(-3, 0, shape[0]).view(-1, 1)
    low, high = PRESETS[preset].singular_range
    for matrix in (torch.randn(shape), steep.float(), spiked.float(), uneven, 1 + 0.01 * torch.randn(shape)):
        paths = (accelerated(), TensorCores()) if dtype is torch.float16 else ()
        with contextlib.ExitStack() as stack:
            for path in paths:
                stack.enter_context(path)
            direction = newton_schulz(matrix.unsqueeze(0), resolve(preset), dtype)[0].double()
        u, values, vh = torch.linalg.svd(normalized(matrix), full_matrices=False)
        stretches = (u.mT @ direction @ vh.mT).diagonal()[values >= least]
        assert stretches.min() >= low - below
        assert spectrum(direction).max() <= high + above


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (4, 20, 60)], ids=str)
def test_polar_express_with_many_steps_is_the_polar_factor(shape):
    matrix = torch.randn(shape)
    result = orthogonalize(matrix, ns_steps=10, ns_dtype="fp32")
    assert (result - polar_factor(matrix)).abs().max() < 1e-4


def test_a_list_has_the_coefficients_of_each_step_and_their_number():
    matrix = torch.randn(24, 40)
    for name, preset in PRESETS.items():
        assert len(resolve(name)) == len(resolve(name, AUTO)) == (10 if name == "deepseek_v4" else 5)
        steps = len(preset.steps)
        expected = orthogonalize(matrix, ns_coefficients=name, ns_steps=steps, ns_dtype="fp32")
        for options in ({}, {"ns_steps": steps}):
            result = orthogonalize(matrix, ns_coefficients=preset.steps, ns_dtype="fp32", **options)
            assert torch.equal(result, expected)
    assert resolve((1.5, -0.5, 0.0)) == ((1.5, -0.5, 0.0),) * 5
    assert len(resolve(((1.5, -0.5, 0.0),) * 7)) == len(resolve("original", 7)) == 7


# --- Scales and other inputs


@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e10, 1e20, 3e37])
def test_extreme_scales(scale):
    matrix = torch.randn(24, 40)
    matrix /= matrix.abs().max()
    result = orthogonalize(matrix * scale, ns_dtype="fp32")
    assert (result - orthogonalize(matrix, ns_dtype="fp32")).abs().max() < 1e-4


def test_subnormal_input_keeps_its_direction():
    signs = torch.randn(16, 16).sign()
    assert torch.equal(orthogonalize(signs * 2.0**-140, ns_dtype="fp32"), orthogonalize(signs, ns_dtype="fp32"))


def test_each_matrix_of_a_batch_has_its_own_scale():
    batch = torch.randn(4, 12, 20) * torch.tensor([1e-12, 1.0, 1e12, 0.0]).view(4, 1, 1)
    result = orthogonalize(batch, ns_dtype="fp32")
    for one, matrix in zip(result, batch, strict=True):
        torch.testing.assert_close(one, orthogonalize(matrix, ns_dtype="fp32"), rtol=0, atol=1e-5)


def test_zeros_and_empty_matrices():
    for preset, ns_dtype in itertools.product(PRESETS, ("fp32", "bf16")):
        zeros = torch.zeros(5, 7)
        assert torch.equal(orthogonalize(zeros, ns_dtype=ns_dtype, ns_coefficients=preset), zeros)
    for shape in ((0, 4, 5), (0, 5)):
        assert orthogonalize(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("transform", [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x.expand(3, *x.shape)])
def test_strides_do_not_matter(transform):
    matrix = transform(torch.randn(20, 36))
    assert torch.equal(orthogonalize(matrix), orthogonalize(matrix.contiguous()))


def test_autocast_does_not_reach_the_products():
    matrix = torch.randn(20, 36)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = orthogonalize(matrix, ns_dtype="fp32")
    assert torch.equal(inside, orthogonalize(matrix, ns_dtype="fp32"))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiles_into_one_graph():
    compiled = torch.compile(orthogonalize, backend="aot_eager", fullgraph=True)
    # Without compilation, the second shape multiplies in blocks.
    for shape, tolerance in (((2, 64, 128), 1e-6), ((1, 400, 640), 1e-5)):
        matrix = torch.randn(shape)
        assert (compiled(matrix, ns_dtype="fp32") - orthogonalize(matrix, ns_dtype="fp32")).abs().max() < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [None, cost.BlockRows(100, 50)])
@pytest.mark.parametrize("shape", [(2, 256, 256), (2, 256, 1024)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)], ids=str
)
def test_gpu_equals_the_polynomials(shape, dtype, tolerance, rows):
    coefficients = resolve("polar_express", 5)
    matrices = torch.randn(shape, device="cuda")
    expected = newton_schulz_on_singular_values(matrices, coefficients)
    result = newton_schulz(matrices, coefficients, dtype, rows=rows).double()
    assert (result - expected).norm() < tolerance * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [None, cost.BlockRows(100, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 256, 256), (2, 256, 1024)], ids=str)
def test_gpu_graph_and_no_synchronization(shape, dtype, rows):
    coefficients = resolve("polar_express", 5)
    matrices = torch.randn(shape, device="cuda")
    expected = newton_schulz(matrices, coefficients, dtype, rows=rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        newton_schulz(matrices, coefficients, dtype, rows=rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = newton_schulz(matrices, coefficients, dtype, rows=rows)
    graph.replay()
    assert torch.equal(captured, expected)
