from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_muon import orthogonalize
from hf_muon.math import cost
from hf_muon.math.coefficients import AUTO, PRESETS, resolve
from hf_muon.math.newton_schulz import newton_schulz
from tests.accelerated import accelerated
from tests.math.matrices import WAYS, lengths_of, spectrum, with_spectrum
from tests.reference import newton_schulz_on_singular_values, normalized, polar_factor

SHAPES = [(64, 64), (96, 32), (32, 96), (16, 800), (800, 16), (61, 127), (127, 61), (2, 2), (3, 48, 20), (5, 17, 31)]
# Rounding moves singular values out of their range: bf16 has 8 significant bits, and a step rounds three products.
SLACK = {"fp32": 2e-3, "bf16": 6e-2}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_equals_the_polynomials_on_the_singular_values(shape, preset):
    matrix = torch.randn(shape)
    expected = newton_schulz_on_singular_values(matrix, resolve(preset))
    result = orthogonalize(matrix, ns_coefficients=preset, ns_dtype="fp32")
    assert (result - expected).abs().max() < 1e-4 * expected.abs().max()


# Rounding to the dtype of the result sets the tolerance; bf16 products leave an error of about 1.5e-2.
@pytest.mark.parametrize(
    ("dtype", "ns_dtype", "tolerance"),
    [
        (torch.float64, "fp32", 1e-5),
        (torch.float16, "fp32", 5e-4),
        (torch.bfloat16, "fp32", 3e-3),
        (torch.float64, "bf16", 3e-2),
        (torch.float16, "bf16", 3e-2),
        (torch.bfloat16, "bf16", 3e-2),
    ],
)
@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (127, 61), (3, 48, 20)], ids=str)
def test_other_dtypes_equal_the_polynomials_too(shape, dtype, ns_dtype, tolerance):
    matrix = torch.randn(shape).to(dtype)
    expected = newton_schulz_on_singular_values(matrix, resolve("polar_express", 5))
    difference = (orthogonalize(matrix, ns_dtype=ns_dtype).double() - expected).norm() / expected.norm()
    assert difference < tolerance


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (40, 160), (160, 40), (61, 127)])
def test_singular_values_stay_in_the_range_of_the_preset(preset, ns_dtype, m, n):
    values = torch.logspace(-3, 0, min(m, n), dtype=torch.float64)
    matrix = with_spectrum(m, n, values / values.norm())
    # The range holds for inputs from 1e-3 to 1; division by the Frobenius norm takes the smallest below that.
    first = normalized(matrix)
    inside = spectrum(first) >= 1e-3
    result = spectrum(orthogonalize(matrix.float(), ns_coefficients=preset, ns_dtype=ns_dtype)).flip(0)
    low, high = PRESETS[preset].singular_range
    expected = spectrum(newton_schulz_on_singular_values(matrix, resolve(preset)))
    assert expected.max() <= high
    assert result.max() <= high + SLACK[ns_dtype]
    # The stretch of each input direction: the component of the result along the polar factor.
    stretched = polar_factor(first).T @ orthogonalize(matrix.float(), ns_coefficients=preset, ns_dtype="fp32").double()
    stretches = torch.linalg.eigvalsh((stretched + stretched.T) / 2).flip(0)[: int(inside.sum())]
    assert int(inside.sum()) > min(m, n) * 3 // 4
    assert stretches.min() >= low - SLACK["fp32"]


def test_ranges_are_what_the_coefficients_give():
    values = torch.logspace(-3, 0, 20001, dtype=torch.float64)
    for name, preset in PRESETS.items():
        for steps, bounds in ((AUTO, preset.singular_range), (4, preset.singular_range_of_four)):
            if bounds is None:
                continue
            result = values.clone()
            for a, b, c in resolve(name, steps):
                result = a * result + b * result**3 + c * result**5
            assert bounds[0] <= result.min() <= bounds[0] + 1e-2
            assert result.max() <= bounds[1]


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (4, 20, 60)], ids=str)
def test_polar_express_with_many_steps_is_the_polar_factor(shape):
    matrix = torch.randn(shape)
    result = orthogonalize(matrix, ns_steps=10, ns_dtype="fp32")
    assert (result - polar_factor(matrix)).abs().max() < 1e-4


@pytest.mark.parametrize("exponent", [-66, -40, -1, 1, 40, 66])
@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 10, 12)], ids=str)
def test_powers_of_two_do_not_change_a_bit(exponent, ns_dtype, shape):
    matrix = torch.randn(shape)
    expected = orthogonalize(matrix, ns_dtype=ns_dtype)
    assert torch.equal(orthogonalize(matrix * 2.0**exponent, ns_dtype=ns_dtype), expected)


@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e10, 1e20, 3e37])
def test_extreme_scales(scale):
    matrix = torch.randn(24, 40)
    matrix /= matrix.abs().max()
    result = orthogonalize(matrix * scale, ns_dtype="fp32")
    assert (result - orthogonalize(matrix, ns_dtype="fp32")).abs().max() < 1e-4


def test_subnormal_input_keeps_its_direction():
    matrix = torch.randn(16, 16).sign() * 2.0**-140
    expected = orthogonalize(matrix * 2.0**120 * 2.0**20, ns_dtype="fp32")
    assert torch.equal(orthogonalize(matrix, ns_dtype="fp32"), expected)


def test_each_matrix_of_a_batch_has_its_own_scale():
    batch = torch.randn(4, 12, 20) * torch.tensor([1e-12, 1.0, 1e12, 0.0]).view(4, 1, 1)
    result = orthogonalize(batch, ns_dtype="fp32")
    for one, matrix in zip(result, batch, strict=True):
        torch.testing.assert_close(one, orthogonalize(matrix, ns_dtype="fp32"), rtol=0, atol=1e-5)
    assert torch.equal(result[3], torch.zeros(12, 20))


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_zero_gives_zero(ns_dtype, preset):
    result = orthogonalize(torch.zeros(5, 7), ns_dtype=ns_dtype, ns_coefficients=preset)
    assert torch.equal(result, torch.zeros(5, 7))


def test_empty_matrices():
    assert orthogonalize(torch.empty(0, 4, 5)).shape == (0, 4, 5)
    assert orthogonalize(torch.empty(0, 5)).shape == (0, 5)


@pytest.mark.parametrize("rank", [1, 3])
def test_rank_deficient(rank):
    matrix = torch.randn(30, rank) @ torch.randn(rank, 50)
    expected = newton_schulz_on_singular_values(matrix, resolve("polar_express", 5))
    result = orthogonalize(matrix, ns_dtype="fp32")
    # The null directions hold rounding noise of 1e-7, which five steps amplify by at most about 2000.
    assert (result - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("ns_dtype", ["auto", "fp32", "bf16"])
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (2, 8, 12)], ids=str)
def test_dtype_comes_back_and_input_is_not_written(dtype, ns_dtype, shape):
    matrix = torch.randn(shape, dtype=torch.float32).to(dtype)
    before = matrix.clone()
    result = orthogonalize(matrix, ns_dtype=ns_dtype)
    assert result.dtype == dtype
    assert result.shape == matrix.shape
    assert torch.equal(matrix, before)
    assert result.data_ptr() != matrix.data_ptr()


@pytest.mark.parametrize("transform", [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x.expand(3, *x.shape)])
def test_strides_do_not_matter(transform):
    matrix = transform(torch.randn(20, 36))
    assert torch.equal(orthogonalize(matrix), orthogonalize(matrix.contiguous()))


def test_autocast_does_not_reach_the_products():
    matrix = torch.randn(20, 36)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = orthogonalize(matrix, ns_dtype="fp32")
    assert torch.equal(inside, orthogonalize(matrix, ns_dtype="fp32"))


@pytest.mark.parametrize(
    ("matrix", "options", "message"),
    [
        (torch.zeros(3), {}, r"expects \(m, n\) or \(B, m, n\), got a tensor of shape \(3,\)"),
        (torch.zeros(1, 2, 3, 4), {}, r"got a tensor of shape \(1, 2, 3, 4\)"),
        (torch.zeros(3, 3, dtype=torch.int64), {}, "floating point tensor, got torch.int64"),
        (
            torch.ones(3, 3),
            {"ns_coefficients": "polar"},
            "you_jiacheng, cans, deepseek_v4, or three",
        ),
        (torch.ones(3, 3), {"ns_coefficients": (1.0, 2.0)}, "three numbers, or three for each step"),
        (torch.ones(3, 3), {"ns_coefficients": ((3, -3, 1), (2.0, 1.0))}, "three numbers, or three for each step"),
        (torch.ones(3, 3), {"ns_coefficients": ((3, -3, 1), 2.0, 1.0)}, "three numbers, or three for each step"),
        (torch.ones(3, 3), {"ns_coefficients": ((3, -3, 1),) * 2, "ns_steps": 3}, "lists 2 steps.* set ns_steps=2"),
        (torch.ones(3, 3), {"ns_coefficients": "deepseek_v4", "ns_steps": 5}, "exactly 10 steps"),
        (torch.ones(3, 3), {"ns_steps": 0}, "auto or an integer of at least 1"),
        (torch.ones(3, 3), {"ns_steps": 2.5}, "integer of at least 1"),
        (torch.ones(3, 3), {"ns_coefficients": "you_jiacheng", "ns_steps": 4}, "exactly 5 steps"),
        (torch.ones(3, 3), {"ns_dtype": "fp8"}, "Valid: auto, bf16, fp16, fp32"),
        (torch.ones(3, 3), {"ns_dtype": "fp16"}, "does not run on a CPU"),
    ],
)
def test_bad_input(matrix, options, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(matrix, **options)


@given(
    m=st.integers(2, 24),
    n=st.integers(2, 24),
    batch=st.sampled_from([None, 1, 3]),
    exponent=st.integers(-60, 60),
    seed=st.integers(0, 2**20),
    preset=st.sampled_from(sorted(PRESETS)),
)
def test_property_matches_the_svd(m, n, batch, exponent, seed, preset):
    generator = torch.Generator().manual_seed(seed)
    shape = (m, n) if batch is None else (batch, m, n)
    matrix = torch.randn(shape, generator=generator) * 2.0**exponent
    expected = newton_schulz_on_singular_values(matrix, resolve(preset))
    result = orthogonalize(matrix, ns_coefficients=preset, ns_dtype="fp32")
    # Five steps amplify rounding noise of 1e-7 in the smallest directions by up to 2000.
    assert (result - expected).abs().max() < 2e-3
    transposed = orthogonalize(matrix.mT, ns_coefficients=preset, ns_dtype="fp32").mT
    assert (result - transposed).abs().max() < 2e-3


# --- each form and each way to multiply, forced

ASPECTS = [(17, 17), (24, 36), (7, 28), (31, 17), (2, 13, 40), (3, 9, 200), (8, 512), (1, 6)]


@pytest.mark.parametrize(("lengths", "rows"), WAYS, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_way_equals_the_polynomials(lengths, rows, preset):
    coefficients = resolve(preset)
    lengths = lengths_of(lengths, len(coefficients))
    for shape in ASPECTS:
        matrices = torch.randn(shape)
        expected = newton_schulz_on_singular_values(matrices, coefficients)
        batch = matrices if matrices.ndim == 3 else matrices.unsqueeze(0)
        result = newton_schulz(batch, coefficients, torch.float32, lengths=lengths, rows=rows).view(shape)
        assert (result - expected).abs().max() < 1e-4 * expected.abs().max(), shape


@pytest.mark.parametrize(("lengths", "rows"), WAYS, ids=str)
def test_every_way_with_matrices_that_are_not_easy(lengths, rows):
    coefficients = resolve("polar_express", 5)

    def way(matrix):
        return newton_schulz(matrix.unsqueeze(0), coefficients, torch.float32, lengths=lengths, rows=rows)[0]

    assert torch.equal(way(torch.zeros(7, 20)), torch.zeros(7, 20))
    matrix = torch.randn(11, 30)
    for exponent in (-66, 40):
        assert torch.equal(way(matrix * 2.0**exponent), way(matrix))
    assert (way(matrix) - way(matrix.T).T).abs().max() < 2e-4
    low_rank = torch.randn(30, 3) @ torch.randn(3, 50)
    expected = newton_schulz_on_singular_values(low_rank, coefficients)
    assert (way(low_rank) - expected).norm() < 2e-2 * expected.norm()
    values = torch.logspace(-3, 0, 24, dtype=torch.float64)
    spread = with_spectrum(24, 96, values / values.norm())
    expected = newton_schulz_on_singular_values(spread, coefficients)
    assert (way(spread.float()) - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("m", "n"), [(64, 128), (64, 1024)])
def test_the_standard_form_stays_in_the_range_in_bf16(preset, m, n):
    coefficients = resolve(preset)
    assert max(cost.segments((m, n), len(coefficients), torch.bfloat16)) == 1
    low, high = PRESETS[preset].singular_range
    values = torch.logspace(-2, 0, m, dtype=torch.float64)
    for matrix in (torch.randn(m, n), with_spectrum(m, n, values)):
        result = spectrum(newton_schulz(matrix.float().unsqueeze(0), coefficients, torch.bfloat16)[0])
        assert low - SLACK["bf16"] <= result.min()
        assert result.max() <= high + SLACK["bf16"]


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


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("m", "n"), [(256, 256), (256, 512), (1000, 256)])
def test_both_forms_stay_in_the_range_in_fp16(preset, m, n):
    """By the paths of accelerators, beside the direction that fp64 computes from singular values."""
    coefficients = resolve(preset)
    low, high = PRESETS[preset].singular_range
    short = min(m, n)
    values = torch.logspace(-2, 0, short, dtype=torch.float64)
    for matrix in (torch.randn(m, n), with_spectrum(m, n, values / values.norm()).float()):
        with accelerated(), TensorCores():
            direction = newton_schulz(matrix.unsqueeze(0), coefficients, torch.float16)[0].double()
        exact = newton_schulz_on_singular_values(matrix, coefficients)
        assert (direction - exact).norm() < 1.2e-2 * exact.norm()
        result = spectrum(direction)
        assert low - 2e-3 <= result[spectrum(normalized(matrix)) >= 1e-3].min()
        assert result.max() <= high + 2e-3


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiles_into_one_graph():
    compiled = torch.compile(orthogonalize, backend="aot_eager", fullgraph=True)
    # Without compilation, the second shape multiplies in blocks.
    for shape, tolerance in (((2, 64, 128), 1e-6), ((1, 400, 640), 1e-5)):
        matrix = torch.randn(shape)
        assert (compiled(matrix, ns_dtype="fp32") - orthogonalize(matrix, ns_dtype="fp32")).abs().max() < tolerance


@pytest.mark.gpu
def test_gpu_ranges():
    for preset in PRESETS:
        result = spectrum(orthogonalize(torch.randn(256, 1024, device="cuda"), ns_coefficients=preset))
        assert result.max() <= PRESETS[preset].singular_range[1] + SLACK["bf16"]
        assert result.min() >= PRESETS[preset].singular_range[0] - SLACK["bf16"]


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
