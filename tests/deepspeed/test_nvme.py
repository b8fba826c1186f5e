"""ZeRO-3 with its optimizer on a disk: DeepSpeed swaps master weights and moments with asynchronous I/O."""

from __future__ import annotations

import functools

import pytest

from tests.bounds import TIMES
from tests.deepspeed.cases import single, train, why_no_async_io
from tests.deepspeed.loading_cases import load_error
from tests.deepspeed.test_training import assert_close, assert_equal, assert_resumes

WHY_NOT = why_no_async_io()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"DeepSpeed's async_io: {WHY_NOT}"),
    pytest.mark.usefixtures("quiet"),
]

reference = functools.lru_cache(maxsize=16)(functools.partial(single, wide=True))
PIPELINE = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
# With the default of buffer_count a pipeline has no room for the next partition.
KINDS = {"plain": {}, "pipelined": PIPELINE}


def on_disk(folder, **options):
    """Return options with which DeepSpeed swaps large sub-groups and leaves small ones in memory."""
    offload = {"device": "nvme", "nvme_path": str(folder), **options}
    return {"stage": 3, "wide": True, "zero": {"offload_optimizer": offload, "sub_group_size": 262144}}


@pytest.mark.extended
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
        # A sum of 10,350 products rounds more often than the controls move its inputs.
        assert_close(one, reference, times=4 * TIMES, **options)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_given_equal_gradients_nvme_gives_the_bits_of_one_process(ranks, kind, dtype, tmp_path):
    """Include a matrix without gradients among others, for which DeepSpeed leaves stale memory of the buffer."""
    for result in ranks.run(train, same_data=True, dtype=dtype, **on_disk(tmp_path, **KINDS[kind])):
        assert_equal(result, reference(dtype=dtype))
        assert result["dtypes"] == ["torch.float32"]


@pytest.mark.extended(but="plain-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(ranks, kind, dtype, tmp_path):
    options = {"dtype": dtype, **on_disk(tmp_path / "swap", **KINDS[kind])}
    for one in assert_resumes(ranks, str(tmp_path / "checkpoint"), 4, 8, **options):
        assert one["steps"] == [8, 8, 8]


def test_a_model_too_small_to_be_swapped_resumes_exactly(ranks, tmp_path):
    options = {**on_disk(tmp_path / "swap"), "wide": False}
    for one in assert_resumes(ranks, str(tmp_path / "checkpoint"), 3, 5, **options):
        assert not any(one["swapped"])


def test_swap_files_of_other_names_are_refused(ranks, tmp_path):
    """Rename swap files as a process writes them that has built another model before."""
    path = str(tmp_path / "checkpoint")
    ranks.run(train, last=2, save=path, **on_disk(tmp_path / "swap"))
    for file in (tmp_path / "checkpoint").glob("*/offloaded_tensors/rank01/momentum_buffer*"):
        file.rename(file.with_name("momentum_buffer-90_91.tensor.swp"))
    one, other = ranks.run(load_error, load=path, **on_disk(tmp_path / "swap"))
    assert one == other
    assert "make the same models as the run that wrote it, in the same order" in one
