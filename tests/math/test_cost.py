from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.live_bytes import LiveBytes
from hf_muon.math import cost
from hf_muon.math.coefficients import resolve
from hf_muon.math.newton_schulz import Orthogonalizer, newton_schulz
from tests.math.matrices import STANDARD, WAYS


def test_the_way_depends_on_the_shape_and_the_dtype_alone():
    for dtype, gram in ((torch.float32, (3, 2)), (torch.float16, (3, 2)), (torch.bfloat16, STANDARD)):
        for shape in ((256, 385), (385, 256), (3, 256, 385), (4096, 14336)):
            assert cost.segments(shape, 5, dtype) == gram
        for shape in ((64, 97), (97, 64), (3, 64, 97), (255, 4096)):
            assert cost.segments(shape, 5, dtype) == (gram if dtype is torch.float32 else STANDARD)
        for shape in ((64, 96), (96, 64), (3, 64, 96), (63, 4096), (4096, 4096)):
            assert cost.segments(shape, 5, dtype) == STANDARD
    for steps in range(1, 12):
        assert sum(cost.segments((64, 256), steps, torch.float32)) == steps
    assert cost.block_rows(255, torch.float32, "cpu") == (255, 255)
    assert cost.block_rows(256, torch.float32, "cpu") == (128, 128)
    assert cost.block_rows(512, torch.float32, "cpu") == (176, 128)
    assert cost.block_rows(3584, torch.float32, "cpu") == (304, 304)
    assert cost.block_rows(511, torch.bfloat16, "cpu") == (511, 511)
    assert cost.block_rows(1024, torch.bfloat16, "cpu") == (256, 256)
    assert cost.block_rows(4096, torch.float16, "cpu") == (2048, 2048)
    assert cost.block_rows(4096, torch.bfloat16, "cuda") == (4096, 4096)


@pytest.mark.parametrize(("lengths", "rows"), [*WAYS, (STANDARD, None), ((4, 1), None)], ids=str)
def test_flops_are_counted_as_they_are(lengths, rows):
    for shape in ((12, 31), (20, 20), (31, 7)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(2, *shape), resolve("original", 5), torch.float32, lengths=lengths, rows=rows)
        assert counter.get_total_flops() == 2 * cost.flops(shape, lengths, rows)


def test_the_form_with_the_fewest_flops_is_chosen():
    for long in (64, 80, 95, 96, 97, 128, 4096):
        chosen = cost.flops((64, long), cost.segments((64, long), 5, torch.float32))
        assert chosen == min(cost.flops((64, long), lengths) for lengths in (STANDARD, (2, 2, 1), (3, 2)))


@pytest.mark.parametrize("shape", [(7, 12, 20), (7, 64, 20), (7, 64, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_within_the_limit(shape, dtype, monkeypatch):
    coefficients = resolve("polar_express", 5)
    matrices = torch.randn(shape)
    rows = cost.block_rows(min(shape[1:]), dtype, "cpu")
    each = cost.working_bytes(shape, cost.segments(shape, 5, dtype), dtype, rows)
    expected = torch.cat([newton_schulz(matrix.unsqueeze(0), coefficients, dtype) for matrix in matrices])
    module = importlib.import_module("hf_muon.math.newton_schulz")
    batches = []

    def recorded(part, *args, **way):
        batches.append(len(part))
        return newton_schulz(part, *args, **way)

    monkeypatch.setattr(module, "newton_schulz", recorded)
    for limit, sizes in ((1, [1] * 7), (2 * each, [2, 2, 2, 1]), (3 * each - 1, [2, 2, 2, 1]), (7 * each, [7])):
        batches.clear()
        result = module.Orthogonalizer(coefficients, dtype, limit)(matrices)
        assert batches == sizes
        assert result.dtype == dtype
        batches.clear()
        overwritten = module.Orthogonalizer(coefficients, dtype, limit)(matrices.clone(), overwrite=True)
        assert batches == sizes
        assert torch.equal(overwritten, result)
        assert (result - expected).abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(module.Orthogonalizer(coefficients, dtype, 1)(matrices), expected)


@pytest.mark.parametrize(("lengths", "rows"), WAYS, ids=str)
@pytest.mark.parametrize("shape", [(3, 12, 31), (3, 20, 20), (3, 31, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_is_written_where_it_belongs(lengths, rows, shape, dtype):
    matrices, coefficients = torch.randn(shape), resolve("original", 5)
    expected = newton_schulz(matrices, coefficients, dtype, lengths=lengths, rows=rows)
    out = torch.full(shape, torch.nan, dtype=dtype)
    result = newton_schulz(matrices, coefficients, dtype, lengths=lengths, rows=rows, out=out)
    assert result is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", [(5, 30, 40), (5, 20, 60), (5, 60, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_batch_is_computed_in_parts_that_stay_in_the_cache(shape, dtype, monkeypatch):
    coefficients = resolve("polar_express", 5)
    matrices = torch.randn(shape)
    lengths = cost.segments(shape, 5, dtype)
    rows = cost.block_rows(min(shape[1:]), dtype, "cpu")
    each = cost.working_bytes(shape, lengths, dtype, rows)
    orthogonalizer = Orthogonalizer(coefficients, dtype)
    whole = newton_schulz(matrices, coefficients, dtype)
    monkeypatch.setattr(cost, "_MOST_BYTES", {"cpu": 2 * each})
    parts = [newton_schulz(part, coefficients, dtype) for part in matrices.split(2)]
    with LiveBytes() as memory:
        result = orthogonalizer(matrices)
    assert torch.equal(result, torch.cat(parts))
    assert (result - whole).abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-5)
    assert memory.peak < matrices.numel() * dtype.itemsize + 2 * each + 1000


@pytest.mark.parametrize("shape", [(1, 64, 64), (2, 64, 160), (2, 160, 64), (1, 400, 640), (1, 520, 530)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_as_computed(shape, dtype):
    matrices = torch.randn(shape)
    lengths = cost.segments(shape, 5, dtype)
    rows = cost.block_rows(min(shape[1:]), dtype, "cpu")
    expected = shape[0] * cost.working_bytes(shape, lengths, dtype, rows)
    with LiveBytes() as memory:
        newton_schulz(matrices, resolve("polar_express", 5), dtype)
    # The slack is one identity for the whole batch, and a few scalars for each matrix.
    assert expected - 1000 < memory.peak < expected + min(shape[1:]) ** 2 * dtype.itemsize + 1000
