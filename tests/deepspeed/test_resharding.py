"""DeepSpeed checkpoints in other layouts: weights, master weights, moments and steps are the uninterrupted run's.

All ranks train on the same data, so that a run has the same bits on any number of ranks and in any stage.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.deepspeed.loading_cases import Planted, damage, load_error, mix
from tests.deepspeed.resharding_cases import chain, straight
from tests.distributed.pool import Pool

pytestmark = pytest.mark.usefixtures("quiet")

CPU = {"offload_optimizer": {"device": "cpu"}}
ROUND_ROBIN = {"stage": 2, "zero": {"round_robin_gradients": True}}
SUB_GROUPS = {"stage": 3, "zero": {**CPU, "sub_group_size": 1500}}
ALIGNED = {"stage": 2, "zero": {"parameter_alignment": True}}
HPZ = {"stage": 3, "zero": {"zero_hpz_partition_size": 2, **CPU, "sub_group_size": 1500}}
BF16_OPTIMIZER = {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}}


@pytest.fixture(scope="module")
def pools(ranks):
    """Yield a function that returns the pool of a number of ranks."""
    started = {2: ranks}

    def pool(count):
        if count not in started:
            started[count] = Pool(count, timeout=240)
        return started[count]

    yield pool
    for count, one in started.items():
        if count != 2:
            one.close()


@pytest.fixture(scope="module")
def uninterrupted(ranks):
    """Return a function that returns what a run in ZeRO-2 has before each step and after the last one."""

    @functools.cache
    def run(**options):
        return ranks.run(straight, last=9, **options)[0]

    return run


def assert_same(state, expected):
    """Compare whole weights, master weights and moments by name."""
    assert state.keys() == expected.keys()
    for name, tensors in expected.items():
        assert state[name].keys() == tensors.keys(), name
        for key, tensor in tensors.items():
            assert state[name][key].dtype == tensor.dtype, (name, key)
            assert torch.equal(state[name][key], tensor), (name, key)


def assert_continues(pools, cells, expected, folder, **options):
    """Train one step in each layout, from the checkpoint of the one before; return the last checkpoint."""
    path = None
    for step, (count, layout) in enumerate(cells):
        target = str(folder / str(step))
        results = pools(count).run(chain, load=path, save=target, first=step, last=step + 1, **layout, **options)
        for result in results:
            assert_same(result["loaded"], expected["states"][step])
            assert_same(result["saved"], expected["states"][step + 1])
            assert result["losses"] == expected["losses"][step : step + 1]
            assert result["counts"] == {step}
        path = target
    return path


def test_stages_offload_and_order(pools, uninterrupted, tmp_path):
    """Go through every stage in bf16 on two ranks, and to one rank and back."""
    cells = [
        (2, ROUND_ROBIN),
        (2, SUB_GROUPS),
        (2, {"stage": 1, "zero": CPU}),
        (2, {"stage": 0}),
        (2, {"stage": 3}),
        (1, {"stage": 1}),
        (2, {"stage": 3, "zero": CPU}),
    ]
    options = {"dtype": "bfloat16"}
    expected = uninterrupted(**options)
    path = assert_continues(pools, cells, expected, tmp_path, **options)
    step = len(cells)  # these comparisons see moments that are dropped
    (result,) = pools(1).run(chain, load=path, first=step, last=step + 1, stage=2, drop="zero", **options)
    for name in ("loaded", "saved"):
        with pytest.raises(AssertionError):
            assert_same(result[name], expected["states"][step + (name == "saved")])


PLAIN = {stage: {"stage": stage} for stage in range(4)}
MORE = {
    "frozen": ({"frozen": True}, [(2, PLAIN[2]), (4, SUB_GROUPS), (1, PLAIN[3]), (2, PLAIN[0]), (4, PLAIN[3])]),
    "tied": ({"tied": True}, [(2, PLAIN[3]), (1, PLAIN[1]), (4, PLAIN[3]), (2, PLAIN[3]), (4, PLAIN[0])]),
    "float32": (
        {"dtype": "float32"},
        [
            (4, ROUND_ROBIN),
            (2, PLAIN[3]),
            (4, HPZ),
            (2, PLAIN[1]),
            (4, PLAIN[0]),
            (1, {"stage": 2, "zero": CPU}),
            (4, PLAIN[3]),
            (2, PLAIN[0]),
        ],
    ),
    "bf16-moments": (
        {"dtype": "bfloat16", "momentum_dtype": "bf16", "adamw_state_dtype": "bf16"},
        [(2, PLAIN[3]), (4, PLAIN[2]), (4, ALIGNED), (1, PLAIN[0]), (2, ALIGNED), (2, SUB_GROUPS)],
    ),
    "bf16-optimizer": ({"dtype": "bfloat16"}, [(2, BF16_OPTIMIZER), (4, PLAIN[3]), (1, BF16_OPTIMIZER), (2, PLAIN[2])]),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", MORE)
def test_numbers_of_ranks(pools, uninterrupted, name, tmp_path):
    options, cells = MORE[name]
    assert_continues(pools, cells, uninterrupted(**options), tmp_path, **options)


@pytest.mark.extended
@pytest.mark.parametrize(("first", "then"), [(3, 2), (2, 3)])
def test_files_that_another_layout_has_left_in_the_folder(ranks, uninterrupted, first, then, tmp_path):
    """Overwrite a tag in another stage, and load it in the stage whose files it also holds."""
    ranks.run(chain, stage=first, last=2, save=str(tmp_path), lr=1e-3)
    ranks.run(chain, stage=then, last=2, save=str(tmp_path))
    for result in ranks.run(chain, stage=first, first=2, last=2, load=str(tmp_path)):
        assert_same(result["loaded"], uninterrupted()["states"][2])


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Return checkpoints of two ranks in bf16, by stage."""
    folders = {stage: str(tmp_path_factory.mktemp(f"zero{stage}")) for stage in (2, 3)}
    for stage, folder in folders.items():
        ranks.run(chain, stage=stage, last=2, save=folder, dtype="bfloat16")
    return folders


@pytest.mark.extended(but="other keys|several")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", r"rank_1_mp_rank_00_optim_states.pt is cut off, .*Resume from the checkpoint before it"),
        (
            "gone",
            r"rank_1_mp_rank_00_optim_states.pt is missing. On another number .* Resume from the checkpoint",
        ),
        ("other keys", r"rank_1_mp_rank_00_optim_states.pt is .*KeyError: 'ds_version'"),
        ("no state", r"rank_1_mp_rank_00_optim_states.pt is .* no file of this rank's"),
        ("code", r"(?s)rank_1_mp_rank_00_optim_states.pt is .* GLOBAL \S*mkdir"),
        ("moments", r"moments are missing: .*momentum_buffer"),
        (
            "several saves",
            r"global_step2 holds files of several saves: bf16_zero_pp_rank_1_.*pt; .*pt. Resume",
        ),
    ],
)
def test_files_of_all_ranks_are_checked_first(ranks, saved, how, words, tmp_path):
    """Load files of ZeRO-2 in ZeRO-3."""
    if how == "several saves":
        folder = shutil.copytree(saved[2], tmp_path / "copy")
        ranks.run(chain, stage=2, first=0, last=2, save=str(tmp_path / "later"), dtype="bfloat16")
        folder = mix(folder, tmp_path / "later", "*/*rank_1_*optim_states.pt")
    else:
        folder = damage(saved[2], tmp_path / "copy", how)
    one, other = ranks.run(load_error, stage=3, load=folder, dtype="bfloat16")
    assert one == other
    assert re.search(words, one)
    assert not (tmp_path / "copy code ran").exists()


def test_objects_in_other_ranks_files_are_not_unpickled(ranks, saved, tmp_path):
    """Load files of ZeRO-3 in ZeRO-2; `client_state` of a rank holds an object of some class."""
    folder = shutil.copytree(saved[3], tmp_path / "copy")
    (file,) = folder.glob("*/zero_pp_rank_1_*_model_states.pt")
    content = torch.load(file, weights_only=False)
    torch.save({**content, "mine": Planted(str(tmp_path / "code ran"))}, file)
    one, other = ranks.run(load_error, stage=2, load=str(folder), dtype="bfloat16")
    assert one == other
    assert re.search(r"(?s)zero_pp_rank_1_mp_rank_00_model_states.pt is .* GLOBAL \S*mkdir", one)
    assert not (tmp_path / "code ran").exists()


def test_masters_of_another_model_are_refused_before_anything_changes(ranks, saved, tmp_path):
    one, other = ranks.run(load_error, stage=3, load=damage(saved[2], tmp_path, "masters"), dtype="bfloat16")
    assert one == other
    assert re.search(r"the fp32 master weights of .*norm.weight.* are not the weights of the model", one)


def changed_index(source, target, **entries):
    """Copy a checkpoint and change its index."""
    folder = shutil.copytree(source, target)
    for file in Path(folder).glob("*/*_states.pt"):
        content = torch.load(file, weights_only=False)
        content["hf_muon_index"] = json.dumps({**json.loads(content["hf_muon_index"]), **entries})
        torch.save(content, file)
    return str(folder)


@pytest.mark.parametrize(
    ("entries", "dtype", "words"),
    [
        ({}, "float32", "was written in bf16, and this run is in fp32. Set bf16 and fp16 as there, or start"),
        (
            {"is_swapped": True, "partitions": []},
            "bfloat16",
            "was written by ZeRO-2 on 2 ranks, and this run is ZeRO-3 on 2 ranks; with the optimizer on NVMe",
        ),
    ],
    ids=["precision", "nvme"],
)
def test_what_another_layout_cannot_take_is_refused(ranks, saved, entries, dtype, words, tmp_path):
    folder = changed_index(saved[2], tmp_path / "copy", **entries)
    for text in ranks.run(load_error, stage=3, load=folder, dtype=dtype):
        assert words in text


def test_another_model_is_refused(ranks, saved):
    for text in ranks.run(load_error, stage=3, load=saved[2], dtype="bfloat16", frozen=True):
        assert "it has blocks.1" in text
        assert "which this optimizer does not train" in text
