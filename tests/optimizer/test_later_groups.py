"""Param groups that come later, parameters that no module holds, and keys of a program's own in groups."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from hf_muon import Muon, MuonOfGroups, build_optimizer
from tests.optimizer.cases import bits, equal, normal

KEYS = ("param_names", "use_muon", "lr", "weight_decay", "views")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8))


def as_lightning(params):
    """Return what BackboneFinetuning adds: parameters without names, and a rate."""
    return {"params": list(params), "lr": 0.01}


def with_names(model, params):
    names = {param: name for name, param in model.named_parameters()}
    return {"params": [(names[param], param) for param in params], "lr": 0.01}


def of_groups(model, **options):
    return MuonOfGroups([p for p in model.parameters() if p.requires_grad], **options)


# --- groups that are added


@pytest.mark.parametrize("make", [build_optimizer, of_groups])
@pytest.mark.parametrize("named", [False, True])
def test_a_layer_that_is_unfrozen_later_is_divided_as_the_first_ones(make, named):
    """Compare with groups that one `MuonOfGroups` makes of both parts at once."""
    model = network()
    model[:3].requires_grad_(False)
    grown = make(model, lr=0.1, weight_decay=0.1)
    first = len(grown.param_groups)
    model.requires_grad_(True)
    later = list(model[:3].parameters())
    grown.add_param_group(with_names(model, later) if named else as_lightning(later))
    expected = MuonOfGroups([as_lightning(later)], model=model, lr=0.1, weight_decay=0.1)
    groups, others = ([[g.get(key) for key in KEYS] for g in o.param_groups] for o in (grown, expected))
    assert groups[first:] == others
    assert ["1.weight"] in [group["param_names"] for group in grown.param_groups[first:] if group["use_muon"]]
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.arange(6)).square().sum().backward()
    grown.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_group_that_fails_leaves_no_part_of_itself():
    model = network()
    model[1].requires_grad_(False)
    optimizer = build_optimizer(model)
    count = len(optimizer.param_groups)
    model[1].requires_grad_(True)
    with pytest.raises(ValueError, match="momentum=2"):
        optimizer.add_param_group({"params": list(model[1].parameters()), "momentum": 2})
    assert len(optimizer.param_groups) == count


@pytest.mark.parametrize("make", [build_optimizer, lambda model, **own: MuonOfGroups(model.parameters(), **own)])
@pytest.mark.parametrize(("use_muon", "rate"), [(False, 0.001), (True, 0.5)])
def test_a_later_group_without_a_rate_has_that_of_its_optimizer(make, use_muon, rate):
    optimizer = make(network(), muon_lr=0.5, adamw_lr=0.001)
    optimizer.add_param_group({"params": [nn.Parameter(normal(3, 4))], "use_muon": use_muon})
    assert optimizer.param_groups[-1]["lr"] == rate


def test_a_rate_that_a_later_group_has_is_its_own():
    model = network()
    model[1].requires_grad_(False)
    optimizer = build_optimizer(model, muon_lr=0.5, adamw_lr=0.001)
    before = len(optimizer.param_groups)
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 1e-4})
    assert {group["lr"] for group in optimizer.param_groups[before:]} == {1e-4}


def test_an_optimizer_keeps_no_model_alive():
    model = network()
    optimizer = build_optimizer(model)
    held = optimizer.add_group.keywords["model"]
    assert held() is model
    del model
    assert held() is None


def test_a_copy_says_what_it_needs():
    optimizer = copy.deepcopy(build_optimizer(network()))
    with pytest.raises(ValueError, match=r"\(name, parameter\) pairs.*\[names-differ\]"):
        optimizer.add_param_group({"params": [nn.Parameter(normal(3, 4))]})
    optimizer.add_param_group({"params": [("new", nn.Parameter(normal(3, 4)))]})


# --- parameters that no module holds


@pytest.mark.parametrize("shape", [(), (3,), (4, 8)])
@pytest.mark.parametrize("later", [False, True])
def test_a_parameter_of_no_module_is_stepped_as_by_adamw(shape, later):
    """Put a temperature, weights of losses and a soft prompt into a group of their own, at first or later."""
    bare, twin = (nn.Parameter(normal(*shape, seed=3)) for _ in range(2))
    model = network()
    own = {"params": [bare], "use_muon": False, "lr": 0.01, "weight_decay": 0.1}
    if later:
        optimizer = build_optimizer(model)
        optimizer.add_param_group(own)
    else:
        optimizer = MuonOfGroups([{"params": model.parameters()}, own])
    theirs = torch.optim.AdamW([twin], lr=0.01, weight_decay=0.1)
    for k in range(3):
        bare.grad = normal(*shape, seed=k)
        twin.grad = bare.grad.clone()
        optimizer.step()
        theirs.step()
    assert equal(bits([bare]), bits([twin]))


def test_a_vector_of_no_module_needs_no_group_of_its_own():
    model, scale = network(), nn.Parameter(torch.tensor(2.3))
    optimizer = MuonOfGroups([*model.parameters(), scale])
    (group,) = [g for g in optimizer.param_groups if any(p is scale for p in g["params"])]
    assert not group["use_muon"]
    again = MuonOfGroups([*model.parameters(), scale])
    again.load_state_dict(optimizer.state_dict())


# --- keys of a program's own

OWN = {
    "DINOv2": {"is_last_layer": False, "lr_multiplier": 1.0, "wd_multiplier": 1.0, "foreach": True, "name": "x"},
    "V-JEPA": {"WD_exclude": True, "weight_decay": 0.0},
    "SAM": {"rho": 0.05, "adaptive": False},
    "MAE": {"lr_scale": 0.5, "layer_id": 3},
    "DeepSpeed": {"moe": True, "name": "experts"},
    "others": {"group_name": "vit", "param_group": "weight", "tag": "a", "lr_mult": 2.0, "decay_mult": 1.0},
}


@pytest.mark.parametrize("program", OWN)
@pytest.mark.parametrize("kind", [Muon, MuonOfGroups])
def test_keys_of_a_program_stay_in_its_groups(kind, program):
    """As in AdamW, through steps, a file and a load; `foreach` and `fused` choose a speed, and may go."""
    own = OWN[program]
    model = network()
    matrices = [model[1].weight, model[3].weight, model[4].weight]
    optimizer = kind([{"params": matrices, **own}], lr=0.1)
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = kind([{"params": matrices, **own}], lr=0.1)
    again.load_state_dict(torch.load(file))
    again.step()
    kept = {key: value for key, value in own.items() if key != "foreach"}
    for group in (*optimizer.param_groups, *again.param_groups):
        assert kept.items() <= group.items()
