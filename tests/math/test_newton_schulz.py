from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from hf_muon import orthogonalize
from hf_muon.math import cost, precision
from hf_muon.math.coefficients import PRESETS, resolve
from hf_muon.math.newton_schulz import newton_schulz, newton_schulz_step
from hf_muon.math.precision import compute_dtype
from hf_muon.math.products import Workspace, symmetric_
from tests.held import Held
from tests.reference import newton_schulz_on_singular_values, polar_factor

SHAPES = [(64, 64), (96, 32), (32, 96), (16, 800), (800, 16), (61, 127), (127, 61), (2, 2), (3, 48, 20), (5, 17, 31)]
# Rounding moves the band's ends: bf16 has eight bits, and each step rounds three products.
SLACK = {"fp32": 2e-3, "bf16": 6e-2}


def spectrum(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrix.double())


def with_spectrum(m: int, n: int, values: torch.Tensor) -> torch.Tensor:
    """A matrix with these singular values."""
    rank = min(m, n)
    u = torch.linalg.qr(torch.randn(m, rank, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64)).Q
    return (u * values) @ v.T


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_equals_the_polynomials_on_the_singular_values(shape, preset):
    matrix = torch.randn(shape)
    expected = newton_schulz_on_singular_values(matrix, resolve(preset, 5))
    result = orthogonalize(matrix, ns_coefficients=preset, ns_dtype="fp32")
    assert (result - expected).abs().max() < 1e-4 * expected.abs().max()


# The result is rounded to its dtype; bf16 products leave about 1.5e-2.
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
def test_singular_values_stay_in_the_band_of_the_preset(preset, ns_dtype, m, n):
    values = torch.logspace(-3, 0, min(m, n), dtype=torch.float64)
    matrix = with_spectrum(m, n, values / values.norm())
    # The band is stated for inputs of 1e-3 to 1; the Frobenius norm takes the smallest below that.
    inside = values / values.norm() >= 1e-3
    result = spectrum(orthogonalize(matrix.float(), ns_coefficients=preset, ns_dtype=ns_dtype)).flip(0)
    low, high = PRESETS[preset].singular_range
    expected = spectrum(newton_schulz_on_singular_values(matrix, resolve(preset, 5)))
    assert expected.max() <= high
    assert result.max() <= high + SLACK[ns_dtype]
    # How far each input direction is stretched: the component of the result along the polar factor.
    stretched = polar_factor(matrix).T @ orthogonalize(matrix.float(), ns_coefficients=preset, ns_dtype="fp32").double()
    kept = torch.linalg.eigvalsh((stretched + stretched.T) / 2).flip(0)[: int(inside.sum())]
    assert int(inside.sum()) > min(m, n) * 3 // 4
    assert kept.min() >= low - SLACK["fp32"]


def test_bands_are_what_the_coefficients_give():
    values = torch.logspace(-3, 0, 20001, dtype=torch.float64)
    for name, preset in PRESETS.items():
        for steps, band in ((5, preset.singular_range), (4, preset.singular_range_of_four)):
            if band is None:
                continue
            result = values.clone()
            for a, b, c in resolve(name, steps):
                result = a * result + b * result**3 + c * result**5
            assert band[0] <= result.min() <= band[0] + 1e-2
            assert result.max() <= band[1]


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
def test_zero_gives_zero(ns_dtype):
    assert torch.equal(orthogonalize(torch.zeros(5, 7), ns_dtype=ns_dtype), torch.zeros(5, 7))


def test_empty_matrices():
    assert orthogonalize(torch.empty(0, 4, 5)).shape == (0, 4, 5)
    assert orthogonalize(torch.empty(0, 5)).shape == (0, 5)


@pytest.mark.parametrize("rank", [1, 3])
def test_rank_deficient(rank):
    matrix = torch.randn(30, rank) @ torch.randn(rank, 50)
    expected = newton_schulz_on_singular_values(matrix, resolve("polar_express", 5))
    result = orthogonalize(matrix, ns_dtype="fp32")
    # The null directions hold rounding noise of 1e-7, which five steps amplify by at most some 2000.
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
        assert torch.equal(orthogonalize(matrix, ns_dtype="fp32"), orthogonalize(matrix.clone(), ns_dtype="fp32"))
        inside = orthogonalize(matrix, ns_dtype="fp32")
    assert torch.equal(inside, orthogonalize(matrix, ns_dtype="fp32"))


def test_auto_is_fp32_where_the_cpu_has_no_bf16(monkeypatch):
    for has_bf16, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda has=has_bf16: has)
        compute_dtype.cache_clear()
        assert compute_dtype("auto", "cpu") is expected
    compute_dtype.cache_clear()


def test_cpu_flags_decide_on_bf16(monkeypatch):
    for flags, expected in (({"avx512_f": True}, False), ({"avx512_bf16": True}, True), ({"amx_bf16": True}, True)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags, raising=False)
        precision.cpu_has_bf16.cache_clear()
        assert precision.cpu_has_bf16() is expected
    precision.cpu_has_bf16.cache_clear()


@pytest.mark.parametrize(
    ("matrix", "options", "message"),
    [
        (torch.zeros(3), {}, r"expects \(m, n\) or \(B, m, n\), got a tensor of shape \(3,\)"),
        (torch.zeros(1, 2, 3, 4), {}, r"got a tensor of shape \(1, 2, 3, 4\)"),
        (torch.zeros(3, 3, dtype=torch.int64), {}, "floating point tensor, got torch.int64"),
        (torch.ones(3, 3), {"ns_coefficients": "polar"}, "Valid: polar_express, original, you_jiacheng, cans"),
        (torch.ones(3, 3), {"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        (torch.ones(3, 3), {"ns_steps": 0}, "integer of at least 1"),
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
    expected = newton_schulz_on_singular_values(matrix, resolve(preset, 5))
    result = orthogonalize(matrix, ns_coefficients=preset, ns_dtype="fp32")
    # Rounding noise of 1e-7 in the smallest directions is amplified by up to 2000.
    assert (result - expected).abs().max() < 2e-3
    transposed = orthogonalize(matrix.mT, ns_coefficients=preset, ns_dtype="fp32").mT
    assert (result - transposed).abs().max() < 2e-3


# --- how it is computed: each form and each way to multiply, forced

STANDARD = (1, 1, 1, 1, 1)
WAYS = [
    (STANDARD, cost.BlockRows(5, 3)),
    ((3, 2), None),
    ((3, 2), cost.BlockRows(5, 4)),
    ((2, 2, 1), None),
    ((2, 2, 1), cost.BlockRows(3, 3)),
    ((1, 2, 2), cost.BlockRows(4, 7)),
]
ASPECTS = [(17, 17), (24, 36), (7, 28), (31, 17), (2, 13, 40), (3, 9, 200), (8, 512), (1, 6)]


def frobenius_normalized(shape):
    matrices = torch.randn(shape, dtype=torch.float64)
    return matrices / torch.linalg.matrix_norm(matrices, keepdim=True)


@pytest.mark.parametrize("low_precision", [True, False])
@pytest.mark.parametrize("shape", [(2, 17, 17), (3, 9, 40), (3, 40, 9)], ids=str)
def test_a_step_is_the_formula(shape, low_precision):
    x = frobenius_normalized(shape)
    wide = x if shape[1] <= shape[2] else x.mT
    r = wide @ wide.mT
    expected = 2.0 * wide - 1.5 * r @ wide + 0.5 * r @ r @ wide
    work = Workspace(x, (1,), cost.BlockRows(5, 4), low_precision=low_precision)
    found = newton_schulz_step(x, (2.0, -1.5, 0.5), work)
    torch.testing.assert_close(found, expected if wide is x else expected.mT)


@pytest.mark.parametrize(("lengths", "rows"), WAYS, ids=str)
@pytest.mark.parametrize("shape", [(2, 17, 17), (3, 9, 40), (3, 40, 9)], ids=str)
def test_every_form_takes_the_same_steps(shape, lengths, rows):
    x = frobenius_normalized(shape)
    found = newton_schulz(x, resolve("polar_express", 5), torch.float64, lengths=lengths, rows=rows)
    work = Workspace(x, STANDARD, cost.BlockRows(*shape[1:]), low_precision=False)
    for coefficients in resolve("polar_express", 5):
        x = newton_schulz_step(x, coefficients, work)
    torch.testing.assert_close(found, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("lengths", "rows"), WAYS, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_way_equals_the_polynomials(lengths, rows, preset):
    coefficients = resolve(preset, 5)
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
@pytest.mark.parametrize("lengths", [STANDARD, (2, 2, 1)], ids=str)
@pytest.mark.parametrize(("m", "n"), [(64, 128), (64, 1024)])
def test_every_form_stays_in_the_band_in_bf16(preset, lengths, m, n):
    coefficients = resolve(preset, 5)
    low, high = PRESETS[preset].singular_range
    values = torch.logspace(-2, 0, m, dtype=torch.float64)
    for matrix in (torch.randn(m, n), with_spectrum(m, n, values)):
        result = newton_schulz(matrix.float().unsqueeze(0), coefficients, torch.bfloat16, lengths=lengths)[0]
        found = spectrum(result)
        assert low - SLACK["bf16"] <= found.min()
        assert found.max() <= high + SLACK["bf16"]


def test_the_way_depends_on_the_shape_and_the_dtype_alone():
    for dtype, gram in ((torch.float32, (3, 2)), (torch.float16, (3, 2)), (torch.bfloat16, STANDARD)):
        for shape in ((64, 97), (97, 64), (3, 64, 97), (4096, 14336)):
            assert cost.segments(shape, 5, dtype) == gram
        for shape in ((64, 96), (96, 64), (3, 64, 96), (63, 4096), (4096, 4096)):
            assert cost.segments(shape, 5, dtype) == STANDARD
    for steps in range(1, 12):
        assert sum(cost.segments((64, 256), steps, torch.float32)) == steps
    assert cost.block_rows(383, torch.float32, "cpu") == (383, 383)
    assert cost.block_rows(512, torch.float32, "cpu") == (176, 128)
    assert cost.block_rows(3584, torch.float32, "cpu") == (304, 304)
    assert cost.block_rows(2047, torch.bfloat16, "cpu") == (2047, 2047)
    assert cost.block_rows(2048, torch.bfloat16, "cpu") == (1024, 1024)
    assert cost.block_rows(4096, torch.bfloat16, "cuda") == (2048, 2048)


@pytest.mark.parametrize(("lengths", "rows"), [*WAYS, (STANDARD, None), ((4, 1), None)], ids=str)
def test_flops_are_counted_as_they_are(lengths, rows):
    for shape in ((12, 31), (20, 20), (31, 7)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(2, *shape), resolve("original", 5), torch.float32, lengths=lengths, rows=rows)
        assert counter.get_total_flops() == 2 * cost.flops(shape, lengths, rows)


def test_the_form_with_fewer_flops_is_taken():
    for long in (64, 80, 95, 96, 97, 128, 4096):
        taken = cost.flops((64, long), cost.segments((64, long), 5, torch.float32))
        assert taken == min(cost.flops((64, long), lengths) for lengths in (STANDARD, (2, 2, 1), (3, 2)))


@pytest.mark.parametrize("rows", [1, 4, 7, 12, 100])
def test_symmetric_products(rows):
    x, addend = torch.randn(2, 12, 20, dtype=torch.float64), torch.randn(2, 12, 12, dtype=torch.float64)
    addend = addend + addend.mT
    out = torch.full((2, 12, 12), torch.nan, dtype=torch.float64)
    torch.testing.assert_close(symmetric_(out, x, x.mT, rows=rows), x @ x.mT)
    expected = 0.3 * addend - 2 * x @ x.mT
    torch.testing.assert_close(symmetric_(out, x, x.mT, add=addend, beta=0.3, alpha=-2, rows=rows), expected)
    torch.testing.assert_close(
        symmetric_(addend, x, x.mT, add=addend, beta=0.3, alpha=-2, rows=rows), expected
    )  # in place


@pytest.mark.parametrize("shape", [(7, 12, 20), (7, 64, 20), (7, 64, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_within_the_limit(shape, dtype, monkeypatch):
    coefficients = resolve("polar_express", 5)
    matrices = torch.randn(shape)
    rows = cost.block_rows(min(shape[1:]), dtype, "cpu")
    each = cost.working_bytes(shape, cost.segments(shape, 5, dtype), dtype, rows)
    held = matrices.numel() * (4 + dtype.itemsize)
    expected = torch.cat([newton_schulz(matrix.unsqueeze(0), coefficients, dtype) for matrix in matrices])
    module = importlib.import_module("hf_muon.math.newton_schulz")
    batches = []

    def recorded(part, *args, **way):
        batches.append(len(part))
        return newton_schulz(part, *args, **way)

    monkeypatch.setattr(module, "newton_schulz", recorded)
    for limit, sizes in ((1, [1] * 7), (2 * each, [2, 2, 2, 1]), (3 * each - 1, [2, 2, 2, 1]), (7 * each, [7])):
        batches.clear()
        result = module.Orthogonalizer(coefficients, dtype, held + limit)(matrices)
        assert batches == sizes
        assert result.dtype == dtype
        assert (result - expected).abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(module.Orthogonalizer(coefficients, dtype, 1)(matrices), expected)


@pytest.mark.parametrize("shape", [(1, 64, 64), (2, 64, 160), (2, 160, 64), (1, 400, 640)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_it_is_said_to_be(shape, dtype):
    matrices = torch.randn(shape)
    lengths = cost.segments(shape, 5, dtype)
    rows = cost.block_rows(min(shape[1:]), dtype, "cpu")
    said = shape[0] * cost.working_bytes(shape, lengths, dtype, rows)
    with Held() as held:
        newton_schulz(matrices, resolve("polar_express", 5), dtype)
    # A matrix of ones on the diagonal, for all of a batch, and numbers for each matrix.
    assert said - 1000 < held.peak < said + min(shape[1:]) ** 2 * dtype.itemsize + 1000


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiles_into_one_graph():
    compiled = torch.compile(orthogonalize, backend="aot_eager", fullgraph=True)
    # The second one is computed in blocks where it is not compiled.
    for shape, tolerance in (((2, 64, 128), 1e-6), ((1, 400, 640), 1e-5)):
        matrix = torch.randn(shape)
        assert (compiled(matrix, ns_dtype="fp32") - orthogonalize(matrix, ns_dtype="fp32")).abs().max() < tolerance


@pytest.mark.gpu
def test_gpu_bands():
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
