"""Keys of param groups that are not Muon's: those of torch's schedulers, known in one place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from hf_muon import Muon
from hf_muon.config import GROUP_OPTIONS
from hf_muon.optimizer.groups import FOREIGN_KEYS, OWN_KEYS, SCHEDULER_KEYS

SCHEDULERS = {
    "ConstantLR": lr_scheduler.ConstantLR,
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, cycle_momentum=True),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "LinearLR": lr_scheduler.LinearLR,
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5, cycle_momentum=True),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, swa_lr=0.01),
}


def muon():
    weight, bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))
    return Muon([{"params": [weight], "name": "matrices"}, {"params": [bias], "use_muon": False}], lr=0.01)


def keys_of(optimizer):
    return {key for group in optimizer.param_groups for key in group}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_groups_of_a_scheduled_optimizer_are_groups_of_a_new_one(name):
    optimizer = muon()
    SCHEDULERS[name](optimizer)
    assert keys_of(optimizer) <= {*OWN_KEYS, *FOREIGN_KEYS, *GROUP_OPTIONS}
    assert keys_of(Muon(optimizer.param_groups)) == keys_of(optimizer)
    muon().load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("key", SCHEDULER_KEYS)
def test_a_state_with_text_for_a_schedulers_number_is_refused(key):
    state_dict = muon().state_dict()
    state_dict["param_groups"][0][key] = "0.1"
    with pytest.raises(ValueError, match=f"its param group 0 has {key}='0.1', and not a number"):
        muon().load_state_dict(state_dict)


def test_every_key_of_the_list_is_written_by_a_scheduler():
    keys = set()
    for schedule in SCHEDULERS.values():
        optimizer = muon()
        schedule(optimizer)
        keys |= keys_of(optimizer)
    assert set(SCHEDULER_KEYS) <= keys
