"""The format of checkpoints is a promise: states of before load in a version with another option, later ones do not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import hf_muon
from hf_muon import Muon
from hf_muon.config import GROUP_OPTIONS
from hf_muon.optimizer import checkpoint_format
from tests.optimizer import format_cases
from tests.optimizer.cases import stepped

STATES = Path(__file__).parents[1] / "states"


@pytest.fixture(params=[1, 2])
def ranks(request):
    """Return a function that calls a function on one rank or on two, and returns what each has returned."""
    if request.param == 1:
        return lambda function, **kwargs: [function(0, ranks=1, **kwargs)]
    pool = request.getfixturevalue("pools")[2]
    return lambda function, **kwargs: pool.run(function, ranks=2, **kwargs)


def test_states_without_an_option_of_this_version_load(ranks, tmp_path):
    """Expect this run's value: so a later version, with an option more, loads the states of this one."""
    ranks(format_cases.save, folder=tmp_path, remove="nesterov")
    ranks(format_cases.load, folder=tmp_path)


def test_states_of_a_later_version_with_an_option_more_are_refused(ranks, tmp_path):
    ranks(format_cases.save, folder=tmp_path, add={"new_option": 3}, version="7.8.9")
    for texts in ranks(format_cases.refused, folder=tmp_path):
        assert texts.keys() == format_cases.FORMS.keys()
        for text in texts.values():
            assert re.search(rf"new_option of hf_muon 7\.8\.9.*{hf_muon.__version__}.*\[newer-state\]", text)


@pytest.mark.parametrize("version", sorted(folder.name for folder in STATES.iterdir()))
def test_states_of_released_versions_load(version, ranks):
    # Of two ranks; tests/deepspeed loads the last.
    assert {path.name for path in (STATES / version).iterdir()} == {"shards", "whole", "zero2"}
    ranks(format_cases.load, folder=STATES / version)


def test_the_page_lists_what_a_saved_group_has():
    text = (
        (STATES.parents[1] / "docs" / "exactness.md")
        .read_text(encoding="utf-8")
        .partition("## What a param group stores")[2]
    )
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.M))
    groups = stepped()[1].state_dict()["param_groups"]
    assert listed == set().union(*groups)
    content = json.loads(groups[0][checkpoint_format.KEY])
    assert content["format"] == checkpoint_format.FORMAT
    assert {*content["options"], "lr", "weight_decay"} == {*GROUP_OPTIONS, "lr_factors"}


def test_a_flattened_state_of_several_optimizers_is_whole():
    """Expect nothing of SGD, which keeps no state, and each key of a group, also one with a dot."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizers = (Muon([model[0].weight]), torch.optim.SGD([model[0].bias], lr=0.1))
    optimizers[1].param_groups[0]["my.tag"] = 1
    model(torch.ones(3, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizers, options=options)
    momentum = optimizers[0].state[model[0].weight]["momentum_buffer"].clone()
    set_optimizer_state_dict(model, optimizers, state, options=options)
    assert torch.equal(optimizers[0].state[model[0].weight]["momentum_buffer"], momentum)
    assert optimizers[1].param_groups[0]["my.tag"] == 1
