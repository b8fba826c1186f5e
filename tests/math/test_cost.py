"""How a matrix is orthogonalized, by shape, dtype and device, and what it costs beside counted FLOPs and bytes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.live_bytes import LiveBytes
from hf_muon.math import cost, precision
from hf_muon.math.coefficients import resolve
from hf_muon.math.newton_schulz import Orthogonalizer, newton_schulz
from hf_muon.math.precision import compute_dtype
from tests.math.ways import STANDARD, WAYS, Way

POLAR_EXPRESS = resolve("polar_express", 5)


@pytest.fixture(autouse=True)
def _asks_anew():
    yield
    compute_dtype.cache_clear()
    precision.cpu_has_bf16.cache_clear()


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("avx512_f", torch.float32),
        ("avx512_bf16", torch.bfloat16),
        ("amx_bf16", torch.bfloat16),
    ],
)
def test_auto_is_bf16_where_the_cpu_multiplies_it(flag, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True}, raising=False)
    compute_dtype.cache_clear()
    precision.cpu_has_bf16.cache_clear()
    assert compute_dtype("auto", "cpu") is expected


@pytest.mark.parametrize(
    ("hip", "capability", "expected"),
    [
        (None, (9, 0), torch.float16),
        (None, (7, 0), torch.float16),
        (None, (6, 1), torch.float32),
        ("6.2", (9, 4), torch.bfloat16),
    ],
)
def test_auto_on_cuda(hip, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    compute_dtype.cache_clear()
    assert compute_dtype("auto", "cuda", 0) is expected


def test_the_form_depends_on_the_shape_and_the_dtype():
    for dtype, least in ((torch.float32, 64), (torch.float16, 256)):
        for short, long in ((least, 3 * least // 2 + 1), (least, 4096)):
            for shape in ((short, long), (long, short), (3, short, long)):
                assert cost.segments(shape, 5, dtype) == (3, 2)
                assert cost.segments(shape, 5, torch.bfloat16) == STANDARD
        for shape in ((least, 3 * least // 2), (3 * least // 2, least), (least - 1, 4096), (4096, 4096)):
            assert cost.segments(shape, 5, dtype) == STANDARD
    for steps in range(1, 12):
        assert sum(cost.segments((64, 256), steps, torch.float32)) == steps


def test_blocks_are_of_large_matrices_on_a_cpu():
    for dtype, least in ((torch.float32, 256), (torch.bfloat16, 512), (torch.float16, 4096)):
        assert cost.block_rows(least - 1, dtype, "cpu") == (least - 1, least - 1)
        assert cost.block_rows(least, dtype, "cuda") == (least, least)
        for size in (least, 3 * least + 5):
            for rows in cost.block_rows(size, dtype, "cpu"):
                assert rows < size
                assert rows % 16 == 0, "rows that a processor adds at once"
                assert -(-size // rows) <= 12, "more blocks would spend their time in calls"


@pytest.mark.parametrize(("lengths", "rows"), [*WAYS, Way(STANDARD, None), Way((4, 1), None)], ids=str)
def test_flops_are_counted_as_they_are(lengths, rows):
    for shape in ((12, 31), (20, 20), (31, 7)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(2, *shape), POLAR_EXPRESS, torch.float32, lengths=lengths, rows=rows)
        assert counter.get_total_flops() == 2 * cost.flops(shape, lengths, rows)


def test_the_form_with_the_fewest_flops_is_chosen():
    for long in (64, 80, 95, 96, 97, 128, 4096):
        chosen = cost.flops((64, long), cost.segments((64, long), 5, torch.float32))
        assert chosen == min(cost.flops((64, long), lengths) for lengths in (STANDARD, (2, 2, 1), (3, 2)))


@pytest.mark.parametrize("shape", [(7, 12, 20), (7, 20, 64), (7, 64, 128), (5, 60, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_within_the_limit(shape, dtype, monkeypatch):
    """A batch of two comes out as its two would together, takes no more memory, and does not write to its input."""
    matrices, count = torch.randn(shape), shape[0]
    rows = cost.block_rows(min(shape[1:]), dtype, "cpu")
    each = cost.working_bytes(shape, cost.segments(shape, 5, dtype), dtype, rows)
    whole = newton_schulz(matrices, POLAR_EXPRESS, dtype)
    for limit, size in ((1, 1), (2 * each, 2), (3 * each - 1, 2), (count * each, count)):
        expected = torch.cat([newton_schulz(part, POLAR_EXPRESS, dtype) for part in matrices.split(size)])
        assert (expected - whole).abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-5)
        orthogonalizer = Orthogonalizer(POLAR_EXPRESS, dtype, limit)
        with LiveBytes() as memory:
            assert torch.equal(orthogonalizer(matrices), expected)
        assert memory.peak < matrices.numel() * dtype.itemsize + size * each + 1000
        assert torch.equal(orthogonalizer(matrices.clone(), overwrite=True), expected)
        with mock.patch.object(cost, "_MOST_BYTES", {"cpu": limit}):  # what stays in the caches bounds it as well
            assert torch.equal(Orthogonalizer(POLAR_EXPRESS, dtype)(matrices), expected)


@pytest.mark.parametrize(("lengths", "rows"), WAYS, ids=str)
@pytest.mark.parametrize("shape", [(3, 12, 31), (3, 20, 20), (3, 31, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_is_written_where_it_belongs(lengths, rows, shape, dtype):
    matrices = torch.randn(shape)
    expected = newton_schulz(matrices, POLAR_EXPRESS, dtype, lengths=lengths, rows=rows)
    out = torch.full(shape, torch.nan, dtype=dtype)
    assert newton_schulz(matrices, POLAR_EXPRESS, dtype, lengths=lengths, rows=rows, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", [(1, 64, 64), (2, 64, 160), (2, 160, 64), (1, 400, 640), (1, 520, 530)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_as_computed(shape, dtype):
    matrices = torch.randn(shape)
    lengths = cost.segments(shape, 5, dtype)
    rows = cost.block_rows(min(shape[1:]), dtype, "cpu")
    expected = shape[0] * cost.working_bytes(shape, lengths, dtype, rows)
    with LiveBytes() as memory:
        newton_schulz(matrices, POLAR_EXPRESS, dtype)
    # The slack is one identity for the whole batch, and a few scalars for each matrix.
    assert expected - 1000 < memory.peak < expected + min(shape[1:]) ** 2 * dtype.itemsize + 1000
