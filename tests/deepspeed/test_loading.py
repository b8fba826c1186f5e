"""Checkpoints of DeepSpeed that cannot be loaded, or were never finished: one error on all ranks, nothing touched."""

from __future__ import annotations

import re

import pytest

from tests.deepspeed.cases import damage, refused_load, train
from tests.deepspeed.test_training import assert_equal, assert_same_state
from tests.distributed.pool import Pool


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """DeepSpeed's use of what torch has deprecated is not ours to judge."""


@pytest.fixture
def fresh():
    """Pools that a test may break."""
    made = []

    def start(ranks):
        made.append(Pool(ranks, timeout=240))
        return made[-1]

    yield start
    for pool in made:
        pool.close(kill=True)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A checkpoint of two ranks for each stage."""
    folders = {stage: str(tmp_path_factory.mktemp(f"zero{stage}")) for stage in (2, 3)}
    for stage, folder in folders.items():
        ranks.run(train, stage=stage, last=2, save=folder)
    return folders


@pytest.mark.parametrize("others", [1, 4])
def test_another_number_of_ranks_is_refused_with_what_to_do(fresh, saved, others):
    pool = fresh(others)
    for stage, folder in saved.items():
        for found in pool.run(refused_load, stage=stage, load=folder):
            assert f"was written by 2 ranks, and this run has {others}" in found
            assert "Resume on 2 ranks, or start from the weights alone" in found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", r"cannot be read \(.*Resume from the checkpoint before it \[rank 1\]"),
        ("moments", r"moments are missing: .*momentum_buffer.* \[rank 1\]"),
        ("routing", r"param groups hold .*`use_muon` is not among them \[rank 1\]"),
    ],
)
def test_an_error_of_one_rank_is_an_error_of_all(ranks, saved, stage, how, words, tmp_path):
    folder = damage(saved[stage], tmp_path, how)
    one, other = ranks.run(refused_load, stage=stage, load=folder)
    assert one == other
    assert re.search(words, one)


def test_another_stage_is_refused(ranks, saved):
    for found in ranks.run(refused_load, stage=2, load=saved[3]):
        assert "cannot be loaded, and nothing was changed" in found


def test_where_there_is_no_checkpoint_deepspeed_says_so(ranks, tmp_path):
    assert ranks.run(refused_load, stage=2, load=str(tmp_path)) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_that_is_killed_while_it_saves_resumes_from_the_checkpoint_before(fresh, ranks, stage, tmp_path):
    path = str(tmp_path)
    ranks.run(train, stage=stage, last=4, save=path)
    with pytest.raises(AssertionError, match="rank 1: the process died"):
        fresh(2).run(train, stage=stage, first=4, last=6, load=path, save=path, killed=True)
    assert (tmp_path / "global_step6").is_dir()  # unfinished, and `latest` names the other
    straight = ranks.run(train, stage=stage, last=7)
    resumed = ranks.run(train, stage=stage, first=4, last=7, load=path)
    for one, other in zip(resumed, straight, strict=True):
        assert_equal(one, {**other, "losses": other["losses"][4:]})
        assert_same_state(one, other)
