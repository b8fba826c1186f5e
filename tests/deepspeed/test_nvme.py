"""ZeRO-3 with its optimizer on a disk: DeepSpeed swaps master weights and moments, by asynchronous I/O."""

from __future__ import annotations

import functools

import pytest

from tests.deepspeed.cases import single, train, why_no_async_io
from tests.deepspeed.test_training import assert_equal, assert_same_state, distance

WHY_NOT = why_no_async_io()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"DeepSpeed's async_io: {WHY_NOT}")

reference = functools.lru_cache(maxsize=16)(functools.partial(single, wide=True))
PIPELINE = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
# By default a pipeline lacks room for the next partition.
KINDS = {"plain": {}, "pipelined": PIPELINE}


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """DeepSpeed's use of what torch has deprecated is not ours to judge."""


def on_disk(folder, **options):
    """Two sub-groups of Muon and one of AdamW are swapped, the last one of Muon is too small."""
    offload = {"device": "nvme", "nvme_path": str(folder), **options}
    return {"stage": 3, "wide": True, "zero": {"offload_optimizer": offload, "sub_group_size": 262144}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clipping", [None, 0.3], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_nvme_trains_as_memory_and_as_one_process(ranks, accumulate, clipping, dtype, tmp_path):
    options = {"accumulate": accumulate, "clipping": clipping, "dtype": dtype}
    on_nvme = on_disk(tmp_path)
    one, other = ranks.run(train, **options, **on_nvme)
    assert one["swapped"] == [True, False, True, False]
    assert_equal(one, other)
    in_memory = {**on_nvme, "zero": {**on_nvme["zero"], "offload_optimizer": {"device": "cpu"}}}
    assert_equal(one, ranks.run(train, **options, **in_memory)[0])
    if dtype == "float32":
        # ZeRO-3 in memory is as far off: gradients that are summed in another order, through fp32 Newton-Schulz.
        assert distance(one, reference(**options), wide=True) < 5e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_given_equal_gradients_nvme_gives_the_bits_of_one_process(ranks, kind, dtype, tmp_path):
    """Also for a matrix without gradients amid others: DeepSpeed leaves what lay in the buffer as its gradient."""
    for found in ranks.run(train, same_data=True, dtype=dtype, **on_disk(tmp_path, **KINDS[kind])):
        assert_equal(found, reference(dtype=dtype))
        assert found["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(ranks, kind, dtype, tmp_path):
    options = {"dtype": dtype, **on_disk(tmp_path / "swap", **KINDS[kind])}
    path = str(tmp_path / "checkpoint")
    straight = ranks.run(train, last=8, **options)
    ranks.run(train, last=4, save=path, **options)
    for one, other in zip(ranks.run(train, first=4, last=8, load=path, **options), straight, strict=True):
        assert_equal(one, {**other, "losses": other["losses"][4:]})
        assert_same_state(one, other)
        assert other["steps"] == [8, 8, 8]
