"""When a rank is killed or stopped while it saves or loads, no other rank hangs, and `latest` resumes bit for bit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.deepspeed.cases import train
from tests.deepspeed.loading_cases import SAVED_AT, dies, load_error
from tests.deepspeed.pools import PRELOADED
from tests.deepspeed.test_training import assert_equal, assert_same_state
from tests.distributed.kills import Mortal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SEED = 0
LAST = 5


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Return a checkpoint and the uninterrupted run, by stage."""
    runs = {}
    for stage in (2, 3):
        path = str(tmp_path_factory.mktemp(f"zero{stage}"))
        ranks.run(train, stage=stage, last=SAVED_AT, save=path)
        runs[stage] = path, ranks.run(train, stage=stage, last=LAST)
    return runs


def deaths():
    """Draw stage, phase, victim and moment of each death, spread over a whole save and a whole load."""
    draw = random.Random(SEED)
    parts = [(part + draw.random()) / 9 for part in range(9)]
    return [
        pytest.param(stage, phase, draw.randrange(2), part, id=f"{stage}-{phase}-{part:.3f}")
        for phase in ("save", "load")
        for stage, part in zip((2, 3, 2, 3, 2, 3, 2, 3, 2), parts, strict=True)
    ]


def assert_resumes(ranks, folder, step, straight, stage):
    resumed = ranks.run(train, stage=stage, first=step, last=len(straight[0]["losses"]), load=str(folder))
    for mine, theirs in zip(resumed, straight, strict=True):
        assert_equal(mine, {**theirs, "losses": theirs["losses"][step:]})
        assert_same_state(mine, theirs)


def mortal(timeout):
    return Mortal(2, timeout, PRELOADED)


def assert_survived(ranks, saved, folder, victim, stage, timeout, **options):
    path, straight = saved[stage]
    shutil.copytree(path, folder)
    (error,) = mortal(timeout).survivors(dies, victim, stage=stage, path=str(folder), **options)
    latest = Path(folder, "latest").read_text()
    # If a rank dies after all have agreed, the others finish, and the checkpoint is complete.
    assert error is not None or options["phase"] == "load" or latest == f"global_step{SAVED_AT + 1}"
    step = int(latest.removeprefix("global_step"))
    assert_resumes(ranks, folder, step, straight, stage)
    return error


@pytest.mark.extended(but="2-save-0.0|3-load-0.1")
@pytest.mark.parametrize(("stage", "phase", "victim", "part"), deaths())
def test_a_rank_that_is_killed(ranks, saved, stage, phase, victim, part, tmp_path):
    print(f"seed {SEED}")
    assert_survived(ranks, saved, tmp_path / "run", victim, stage, 60, phase=phase, part=part, how="killed")


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "part"), [(2, 0.3), (3, 0.5), (2, 0.7), (3, 0.9)])
def test_a_rank_that_is_killed_while_it_overwrites_a_tag(ranks, saved, stage, part, tmp_path):
    """Save over the checkpoint that `latest` names: it names a whole one afterwards, or there is none.

    By its tag it loads if the rank died before the first file was overwritten, or after the last one, else on no rank.
    """
    folder = shutil.copytree(saved[stage][0], tmp_path / "run")
    options = {"phase": "save", "part": part, "how": "killed", "tag": f"global_step{SAVED_AT}"}
    mortal(60).survivors(dies, 1, stage=stage, path=str(folder), **options)
    if (folder / "latest").is_file():
        steps = {len(result["losses"]) for result in ranks.run(train, stage=stage, last=LAST, load=str(folder))}
        assert steps == {LAST}
    else:
        texts = ranks.run(load_error, stage=stage, load=str(folder), arguments={"tag": options["tag"]}, may_load=True)
        assert len(set(texts)) == 1


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "phase", "part"), [(2, "save", 0.5), (3, "load", 0.1)])
def test_a_rank_that_is_stopped(ranks, saved, stage, phase, part, tmp_path):
    """Stop a rank: the others wait for it until the group's timeout, which is half of the pool's."""
    error = assert_survived(ranks, saved, tmp_path / "run", 1, stage, 30, phase=phase, part=part, how="stopped")
    assert "imed out" in error


@pytest.mark.extended
def test_twenty_deaths_on_the_way_are_the_uninterrupted_run(ranks, saved, tmp_path):
    draw, folder = random.Random(SEED), tmp_path / "run"
    shutil.copytree(saved[2][0], folder)
    for _ in range(20):
        options = {"part": draw.random(), "how": "killed", "whole_before": True}
        mortal(60).survivors(dies, draw.randrange(2), stage=2, path=str(folder), phase="save", **options)
    step = int((folder / "latest").read_text().removeprefix("global_step"))
    assert step >= SAVED_AT + 20
    assert_resumes(ranks, folder, step, ranks.run(train, stage=2, last=step + 1), 2)
