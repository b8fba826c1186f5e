"""ZeRO-3 with its optimizer on a disk: DeepSpeed swaps master weights and moments with asynchronous I/O."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.deepspeed.runs import assert_same, engine_of, run, single, why_no_async_io
from tests.deepspeed.test_checkpoints import load_error, step
from tests.deepspeed.test_training import assert_close, assert_resumes
from tests.support.bounds import TIMES

WHY_NOT = why_no_async_io()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"DeepSpeed's async_io: {WHY_NOT}"),
    pytest.mark.usefixtures("quiet"),
]
PIPELINE = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
# With the default of buffer_count a pipeline has no room for the next partition.
KINDS = {"plain": {}, "pipelined": PIPELINE}


def on_disk(folder, **options):
    """Return options with which DeepSpeed swaps large sub-groups and leaves small ones in memory."""
    offload = {"device": "nvme", "nvme_path": str(folder), **options}
    return {"stage": 3, "wide": True, "zero": {"offload_optimizer": offload, "sub_group_size": 262144}}


@pytest.mark.promise("nvme")
@pytest.mark.first_tier("^plain$")
@pytest.mark.second_tier("plain|clipped-bf16")
@pytest.mark.parametrize(
    ("accumulate", "clipping", "kind", "dtype"),
    [
        (1, None, "plain", "float32"),
        (4, 0.3, "pipelined", "float32"),
        (1, 0.3, "pipelined", "bfloat16"),
        (4, None, "plain", "bfloat16"),
    ],
    ids=["plain", "clipped", "clipped-bf16", "accumulated-bf16"],
)
def test_shards_train_as_in_memory_and_as_one_process_and_resume(ranks, accumulate, clipping, kind, dtype, tmp_path):
    options = {
        "accumulate": accumulate,
        "clipping": clipping,
        "dtype": dtype,
        **on_disk(tmp_path / "swap", **KINDS[kind]),
    }
    result = assert_resumes(ranks, tmp_path / "checkpoint", last=4, at=2, **options)
    assert kind == "pipelined" or result["swapped"] == [True, False, True, False]
    options["zero"] = {**options["zero"], "offload_optimizer": {"device": "cpu"}}
    in_memory = ranks.run(run, last=4, shared=False, **options)[0]
    assert result["losses"] == in_memory["losses"]
    for name, state in result["ended"].items():
        assert_same({name: state}, {name: {key: in_memory["ended"][name][key] for key in state}})
    if dtype == "float32":
        # A sum of 10,350 products rounds more often than the controls move its inputs.
        assert_close(result, 4, 4 * TIMES, accumulate=accumulate, clipping=clipping, wide=True)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "dtype"), [("plain", "bfloat16"), ("pipelined", "float32")])
def test_given_equal_gradients_nvme_gives_the_bits_of_one_process(ranks, kind, dtype, tmp_path):
    """Include a matrix without gradients among others, for which DeepSpeed leaves stale memory of the buffer."""
    expected = single(5, dtype=dtype, wide=True)["states"][5]
    for result in ranks.run(run, last=5, dtype=dtype, **on_disk(tmp_path, **KINDS[kind])):
        for name, state in result["ended"].items():
            assert_same({name: state}, {name: {key: expected[name][key] for key in state}})
        assert result["dtypes"] == {"torch.float32"}


@pytest.mark.extended
def test_a_model_too_small_to_be_swapped_resumes_exactly(ranks, tmp_path):
    options = {**on_disk(tmp_path / "swap"), "wide": False}
    assert not any(assert_resumes(ranks, tmp_path / "checkpoint", last=4, at=2, **options)["swapped"])


@pytest.mark.extended
def test_swap_files_of_other_names_and_weights_alone_are_refused(ranks, tmp_path):
    """Rename swap files as a process writes them that has built another model before."""
    folder = tmp_path / "checkpoint"
    ranks.run(run, last=2, saves={2: str(folder)}, **on_disk(tmp_path / "swap"))
    for file in folder.glob("*/offloaded_tensors/rank01/momentum_buffer*"):
        file.rename(file.with_name("momentum_buffer-90_91.tensor.swp"))
    one, other = ranks.run(load_error, load=str(folder), **on_disk(tmp_path / "swap"))
    assert one == other
    assert "[swap-files-misfit]" in one
    alone = {"arguments": {"load_optimizer_states": False}}
    for text in ranks.run(load_error, load=str(folder), **alone, **on_disk(tmp_path / "swap")):
        assert "[weights-alone-on-nvme]" in text


def save_without_room(rank, folder, **options):
    """Save where rank 1 has no room for its swap files; return the error, and what `latest` names."""
    engine, _ = engine_of(**options)
    step(engine)

    def copytree(*args, **kwargs):
        raise OSError("no space left on device")

    full = mock.patch.object(shutil, "copytree", copytree) if rank else contextlib.nullcontext()
    with full, pytest.raises(RuntimeError) as error:
        engine.save_checkpoint(folder)
    dist.barrier()
    engine.destroy()
    return str(error.value), Path(folder, "latest").exists()


@pytest.mark.extended
def test_a_rank_without_room_for_its_swap_files_is_an_error_of_all(ranks, tmp_path):
    one, other = ranks.run(save_without_room, folder=str(tmp_path / "saved"), **on_disk(tmp_path / "swap"))
    assert one == other
    assert "[checkpoint-not-whole]" in one[0]
    assert "no space left on device [rank 1]" in one[0]
    assert not one[1]
