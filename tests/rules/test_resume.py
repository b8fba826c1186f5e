"""State of rules is saved and resharded like momentum; rules are switched on and off on resume."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from hf_muon import Muon
from hf_muon.rules.normalize import SECOND_MOMENT
from tests.distributed.conftest import run as run
from tests.distributed.test_training import assert_same
from tests.optimizer.cases import gradients, parameters
from tests.optimizer.cases import run as steps_of
from tests.rules.settings import TOGETHER

ROWS = {"normalize": "rows"}


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize(("layout", "ranks", "other", "others"), [("fsdp", 2, "hsdp", 4), ("tp", 2, "single", 1)])
def test_state_moves_between_layouts_and_resumes_exactly(run, layout, ranks, other, others, full, tmp_path):
    path = str(tmp_path / "checkpoint")
    saved = run(layout, ranks, last=3, save=path, full=full, **TOGETHER)
    assert any(SECOND_MOMENT in state and state[SECOND_MOMENT].any() for state in saved["states"].values())
    loaded = run(other, others, first=3, last=3, load=path, full=full, **TOGETHER)
    assert_same({**loaded, "losses": []}, {**saved, "losses": []})
    straight = run(layout, ranks, last=5, **TOGETHER)
    resumed = run(layout, ranks, first=3, last=5, load=path, full=full, **TOGETHER)
    assert_same(resumed, {**straight, "losses": straight["losses"][3:]})


def test_state_that_is_lost_is_refused_and_changes_nothing():
    weights = parameters()
    optimizer = Muon(weights, **ROWS)
    steps_of(optimizer, weights, gradients(steps=2))
    saved = optimizer.state_dict()
    for change, message in [
        (lambda state: state.pop(SECOND_MOMENT), f"lacks ['{SECOND_MOMENT}']"),
        (lambda state: state.update({SECOND_MOMENT: torch.zeros(5)}), "has 5 elements, and its matrices need"),
        (lambda state: state[SECOND_MOMENT].fill_(torch.nan), "is not finite"),
        (lambda state: state[SECOND_MOMENT].neg_(), "has negative entries"),
    ]:
        damaged = {**saved, "state": {k: {n: t.clone() for n, t in s.items()} for k, s in saved["state"].items()}}
        change(damaged["state"][1])
        other = Muon(parameters(), **ROWS)
        with pytest.raises(ValueError, match=re.escape(message)):
            other.load_state_dict(damaged)
        assert not other.state


@pytest.mark.parametrize(("before", "after"), [(ROWS, {}), ({}, ROWS)], ids=["off", "on"])
def test_a_rule_is_switched_on_and_off_on_resume(before, after, caplog):
    weights, grads = parameters(), gradients(steps=6)
    optimizer = Muon(weights, **before)
    steps_of(optimizer, weights, grads[:3])
    resumed = parameters()
    for mine, saved in zip(resumed, weights, strict=True):
        mine.data.copy_(saved.data)
    other = Muon(resumed, **after)
    with caplog.at_level(logging.WARNING, logger="hf_muon"):
        other.load_state_dict(optimizer.state_dict())
    here, there = after.get("normalize", "none"), before.get("normalize", "none")
    assert f"normalize '{here}' here, '{there}' in the checkpoint" in caplog.text
    # The same as an optimizer that has the other's momentum, and a rule whose state is new.
    optimizer.param_groups[0]["normalize"] = here
    for own in optimizer.state.values():
        own.pop(SECOND_MOMENT, None)
    steps_of(optimizer, weights, grads[3:])
    steps_of(other, resumed, grads[3:])
    assert all(map(torch.equal, weights, resumed))
    assert all((SECOND_MOMENT in own) is bool(after) for own in other.state.values())
