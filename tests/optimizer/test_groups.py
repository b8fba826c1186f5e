"""Param groups: valid groups, their keys, and the keys of torch's schedulers."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from hf_muon import Muon, MuonOfGroups
from hf_muon.config import GROUP_OPTIONS
from hf_muon.optimizer.groups import FOREIGN_KEYS, OWN_KEYS, SCHEDULER_KEYS
from tests.optimizer.cases import REST, SHAPES, both_halves, gradients, parameters, run

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


def test_add_param_group_equals_having_had_it():
    late = parameters([(8, 12)], seed=7)
    optimizer, params = both_halves(lr=0.02)
    optimizer.add_param_group({"params": late, "lr": 0.1, "momentum": 0.5})
    run(optimizer, params + late, gradients(SHAPES + REST + [(8, 12)], 3))
    alone = parameters([(8, 12)], seed=7)
    grads = [[step[-1]] for step in gradients(SHAPES + REST + [(8, 12)], 3)]
    run(Muon(alone, lr=0.1, momentum=0.5), alone, grads)
    assert torch.equal(late[0], alone[0])


@pytest.mark.parametrize("name", GROUP_OPTIONS)
def test_param_groups_carry_every_hyperparameter(name):
    optimizer, _ = both_halves()
    assert all(name in group and "use_muon" in group for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ([(4,)], {}, r"parameter 0 \(4,\) is not a matrix"),
        ([(4, 4), (2, 3, 4, 5)], {}, r"parameter 1 \(2, 3, 4, 5\) is not a matrix"),
        ([(4, 4)], {"lr": -1.0}, r"lr=-1.0 is not valid. Valid: a number of at least 0"),
        ([(4, 4)], {"lr": float("nan")}, "lr=nan is not valid"),
        ([(4, 4)], {"lr": torch.ones(2)}, "is not valid"),
        ([(4, 4)], {"weight_decay": -0.1}, "weight_decay=-0.1 is not valid"),
        ([(4, 4)], {"momentum": 1.0}, "momentum=1.0 is not valid. Valid: a number from 0 to below 1"),
        ([(4, 4)], {"nesterov": 1}, "nesterov=1 is not valid. Valid: true or false"),
        ([(4, 4)], {"ns_steps": 0}, "ns_steps=0 is not valid"),
        ([(4, 4)], {"ns_coefficients": "cans", "ns_steps": 6}, "at most 5 steps"),
        ([(4, 4)], {"ns_coefficients": "deepseek_v4", "ns_steps": 5}, "exactly 10 steps"),
        ([(4, 4)], {"ns_coefficients": [(3, -3, 1)] * 2, "ns_steps": 5}, "lists 2 steps, three numbers for each"),
        ([(4, 4)], {"update_rms": -0.2}, "update_rms=-0.2 is not valid. Valid: a number above 0"),
        ([(4, 4)], {"update_rms": 0.3, "adjust_lr_fn": "spectral_unclamped"}, "update_rms=0.3 is the constant of"),
        ([(4, 4)], {"ns_dtype": "fp16"}, "does not run on a CPU"),
        ([(4, 4)], {"adjust_lr_fn": "none"}, "Valid: match_rms_adamw, original or spectral_unclamped"),
        ([(4, 4)], {"adamw_betas": (0.9, 1.0)}, "adamw_betas="),
    ],
)
def test_bad_arguments(params, options, message):
    with pytest.raises(ValueError, match=message):
        Muon(parameters(params), **options)


def test_a_group_without_parameters_is_named_with_its_keys():
    message = r"param group {} has no 'params', but {}. Write the list of its parameters into it under 'params'"
    for kind in (Muon, MuonOfGroups):
        with pytest.raises(ValueError, match=message.format(1, "lr, weight_decay")):
            kind([{"params": parameters([(4, 4)])}, {"lr": 0.1, "weight_decay": 0.1}])
    optimizer = Muon(parameters([(4, 4)]))
    with pytest.raises(ValueError, match=message.format(1, "nothing")):
        optimizer.add_param_group({})
    optimizer.add_param_group({"params": []})
    del optimizer.param_groups[1]["params"]
    with pytest.raises(ValueError, match=message.format(1, "use_muon, .*")):
        optimizer.step()


def test_groups_may_have_coefficients_and_scales_of_their_own():
    steps = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
    groups = [
        {"params": parameters([(4, 4)])},
        {"params": parameters([(4, 4)]), "ns_coefficients": "deepseek_v4"},
        {"params": parameters([(4, 4)]), "ns_coefficients": steps, "update_rms": 0.3},
    ]
    optimizer = Muon(groups)
    assert [group["ns_steps"] for group in optimizer.param_groups] == [5, 10, 2]
    assert [group["update_rms"] for group in optimizer.param_groups] == [0.2, 0.2, 0.3]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = Muon([{"params": group["params"]} for group in groups])
    again.load_state_dict(torch.load(file, weights_only=True))
    keys = ("ns_coefficients", "ns_steps", "update_rms")
    assert [[group[key] for key in keys] for group in again.param_groups] == [
        [group[key] for key in keys] for group in optimizer.param_groups
    ]
    with pytest.raises(ValueError, match="exactly 10 steps"):
        Muon([{"params": parameters([(4, 4)]), "ns_coefficients": "deepseek_v4"}], ns_steps=6)


def test_coefficients_that_are_written_between_steps_need_their_number_of_steps():
    params = parameters([(4, 4)])
    optimizer = Muon(params)
    params[0].grad = torch.ones(4, 4)
    optimizer.param_groups[0]["ns_coefficients"] = "deepseek_v4"
    with pytest.raises(RuntimeError, match="ns_steps=5: the preset 'deepseek_v4' is a sequence of exactly 10 steps"):
        optimizer.step()
    optimizer.param_groups[0]["ns_steps"] = "auto"
    optimizer.step()


def test_unknown_group_key_lists_the_valid_ones_and_adds_nothing():
    optimizer, _ = both_halves()
    with pytest.raises(ValueError, match=r"'betas' is not an option of muon.*Valid: params, use_muon, views, lr"):
        optimizer.add_param_group({"params": parameters([(3, 3)]), "betas": (0.9, 0.9)})
    with pytest.raises(ValueError, match="is not a matrix"):
        optimizer.add_param_group({"params": parameters([(3,)])})
    assert len(optimizer.param_groups) == 2
