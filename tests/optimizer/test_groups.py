"""Param groups, however they are made: by `Muon`, `MuonOfGroups` or `build_optimizer`; which tensors they may hold."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from hf_muon import Muon, MuonConfig, MuonOfGroups, build_optimizer
from hf_muon.config import GROUP_OPTIONS, OPTIONS
from tests.optimizer.cases import bits, both_halves, equal, normal, step, stepped
from tests.refusals.optimizer import Behaving, shard

# --- keys of groups, and torch's schedulers

SCHEDULERS = {
    lr_scheduler.ConstantLR: {},
    lr_scheduler.CosineAnnealingLR: {"T_max": 5},
    lr_scheduler.CosineAnnealingWarmRestarts: {"T_0": 5},
    lr_scheduler.CyclicLR: {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": True},
    lr_scheduler.ExponentialLR: {"gamma": 0.9},
    lr_scheduler.LambdaLR: {"lr_lambda": lambda count: 1 / (1 + count)},
    lr_scheduler.LinearLR: {},
    lr_scheduler.OneCycleLR: {"max_lr": 0.1, "total_steps": 5, "cycle_momentum": True},
    lr_scheduler.ReduceLROnPlateau: {},
    swa_utils.SWALR: {"swa_lr": 0.01},
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_groups_of_a_scheduled_optimizer_are_groups_of_a_new_one(kind):
    optimizer = both_halves()[0]
    optimizer.param_groups[0]["name"] = "matrices"
    scheduler = kind(optimizer, **SCHEDULERS[kind])
    keys = [set(group) for group in optimizer.param_groups]
    assert [set(group) for group in Muon(optimizer.param_groups).param_groups] == keys
    both_halves()[0].load_state_dict(optimizer.state_dict())
    step(optimizer)
    scheduler.step(*([1.0] if kind is lr_scheduler.ReduceLROnPlateau else []))
    for params in ([nn.Parameter(torch.ones(4, 4))], []):
        optimizer.add_param_group({"params": params, "initial_lr": 0.1, "lr": 0.1})
    step(optimizer)


def test_groups_may_have_coefficients_and_scales_of_their_own():
    steps = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    own = [{}, {"ns_coefficients": "original"}, {"ns_coefficients": steps, "update_rms": 0.3}]
    optimizer, again = (
        Muon([{"params": [p], **options} for p, options in zip(params, own, strict=True)]),
        Muon([{"params": [param]} for param in params]),
    )
    assert all(name in group and "use_muon" in group for group in optimizer.param_groups for name in GROUP_OPTIONS)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    for made in (optimizer, again):
        values = [(g["ns_steps"], g["update_rms"], g["ns_coefficients"]) for g in made.param_groups]
        assert values == [(5, 0.2, "polar_express"), (5, 0.2, "original"), (2, 0.3, steps)]
    again.param_groups[0].update(ns_coefficients=steps, ns_steps="auto")  # between steps
    step(again)


# --- groups of a model


def model():
    layers = {"embed": nn.Embedding(20, 8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8, bias=False)}
    return nn.ModuleDict({**layers, "norm": nn.LayerNorm(8)})


def summary(optimizer):
    return [(g["use_muon"], g["lr"], g["weight_decay"], g["param_names"]) for g in optimizer.param_groups]


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"lr": 0.01, "weight_decay": 0.1}, [(0.01, 0.1), (0.01, 0.1), (0.01, 0.0)]),
        (
            {"lr": 0.01, "weight_decay": 0.0, "muon_lr": 0.5, "adamw_lr": "1e-3", "adamw_weight_decay": 0.3},
            [(0.5, 0.0), (0.001, 0.3), (0.001, 0.0)],
        ),
    ],
)
def test_groups_of_a_model(options, rates):
    """By options, by a mapping, whose numbers may be text, and by a config, which options change."""
    config = MuonConfig(**{**MuonConfig.from_mapping(options).__dict__, "lr": 0.7})
    names = ["up.weight", "down.weight"], ["embed.weight"], ["up.bias", "norm.weight", "norm.bias"]
    for arguments, more in (((options,), {}), ((config,), {"lr": 0.01})):
        optimizer = build_optimizer(model(), *arguments, **more)
        assert isinstance(optimizer, Muon)
        assert summary(optimizer) == [(k == 0, *rates[k], names[k]) for k in range(3)]
        assert optimizer.defaults["lr"] == rates[0][0]


def test_matrices_have_their_views_also_of_lazy_modules_that_are_initialized():
    lazy = nn.LazyLinear(6, bias=False)
    lazy(torch.zeros(2, 8))
    layers = {"attention": nn.MultiheadAttention(8, 2, bias=False), "conv": nn.Conv1d(4, 6, 3), "lazy": lazy}
    group = build_optimizer(nn.ModuleDict(layers)).param_groups[0]
    assert group["views"] == ["rows 8+8+8", "", "flat", ""]


def test_rank_zero_logs_one_table(caplog, monkeypatch):
    base = model()
    base["down"].weight = nn.Parameter(torch.zeros(4, 6, dtype=torch.uint8), requires_grad=False)
    base["norm"].requires_grad_(False)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        build_optimizer(base)
        assert len(caplog.records) == 1
    assert "up.weight" in caplog.text
    assert "hidden matrix" in caplog.text
    assert caplog.text.splitlines()[-1] == "frozen: 3 parameters, 1 of them quantized (uint8)"


def test_a_model_is_stepped_as_by_optimizers_of_its_parts():
    """Compare with a Muon over the matrices, torch's AdamW over the rest, and a Muon over a group that is added."""
    one, late = model(), nn.Parameter(normal(8, 12))
    other, alone = copy.deepcopy(one), copy.deepcopy(late)
    options, own = {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.1, "momentum": 0.5}
    rest = [{"params": [other["embed"].weight]}]
    rest += [{"params": [other["up"].bias, *other["norm"].parameters()], "weight_decay": 0.0}]
    optimizers = [
        build_optimizer(one, **options),
        Muon([other["up"].weight, other["down"].weight], **options),
        torch.optim.AdamW(rest, **options),
        Muon([alone], **options | own),
    ]
    optimizers[0].add_param_group({"params": [late], "use_muon": True, **own})
    ours, theirs = [*one.parameters(), late], [*other.parameters(), alone]
    for k in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = normal(*a.shape, seed=k)
            b.grad = a.grad.clone()
        for each in optimizers:
            each.step()
    assert equal(bits(ours), bits(theirs))


# --- parameters without a model: `MuonOfGroups`


class Net(nn.Module):
    """A model without norms and biases, all of whose parameters are matrices."""

    def __init__(self, width, tokens):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])
        self.lm_head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens):
        h = self.wte(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.lm_head(h)


def test_groups_that_are_taken_out_and_added_again_go_on_exactly():
    """Number steps of bf16 weights alike, too: the number decides how they are rounded."""
    states = []
    for again in (False, True):
        model, optimizer = stepped(torch.bfloat16)
        for _ in optimizer.param_groups if again else ():
            group = optimizer.param_groups.pop(0)
            optimizer.add_param_group({key: value for key, value in group.items() if key != "step"})
        step(optimizer, 5)
        states.append([model.state_dict(), optimizer.state_dict()])
    assert equal(*states)


def test_what_is_put_in_is_checked_as_by_the_constructor():
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = Muon([weight], lr=0.1)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.randn(2, 3, 4, 5)))
    weight.grad = torch.randn(8, 8)
    with pytest.raises(RuntimeError, match=r"parameter 1 \(2, 3, 4, 5\) is not a matrix"):
        optimizer.step()


def test_options_that_are_written_later_count():
    """Change them after a step without gradients, which leaves a layout and no state."""
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
    optimizer = Muon([{"params": weights[:1], "use_muon": False}, {"params": weights[1:]}], lr=0.1, ns_dtype="fp32")
    optimizer.step()
    optimizer.param_groups[0]["use_muon"] = True
    optimizer.max_batch_bytes, optimizer.comm_dtype = 1, "bf16"
    twins = [nn.Parameter(weight.detach().clone()) for weight in weights]
    expected = Muon(twins, lr=0.1, ns_dtype="fp32", max_batch_bytes=1, comm_dtype="bf16")
    for weight, twin in zip(weights, twins, strict=True):
        weight.grad = twin.grad = torch.randn(8, 8)
    optimizer.step()
    expected.step()
    assert equal(bits(weights), bits(twins))
    plans = [one._plan(one.param_groups) for one in (optimizer, expected)]
    assert plans[0].layout.lines[0] == plans[1].layout.lines[0]


def test_groups_that_are_added_to_ready_groups_are_split_as_the_first():
    """As a callback that unfreezes a backbone adds them."""
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 40))
    twin = copy.deepcopy(model)
    parts = {"params": list(model[1].parameters()), "lr": 0.1}, {"params": list(model[:3:2].parameters()), "lr": 0.01}
    grown = MuonOfGroups([parts[0]], model=model, weight_decay=0.1)
    grown.add_param_group(parts[1])
    whole = [{"params": list(twin[1].parameters()), "lr": 0.1}, {"params": list(twin[:3:2].parameters()), "lr": 0.01}]
    expected = MuonOfGroups(whole, model=twin, weight_decay=0.1)
    keys = ("param_names", "use_muon", "lr", "weight_decay", "views")
    groups, others = (
        [{key: group.get(key) for key in keys} for group in each.param_groups] for each in (grown, expected)
    )
    assert groups == others
    with pytest.raises(ValueError, match="appear in more than one"):
        grown.add_param_group({"params": [model[3].weight, model[1].weight]})
    assert len(grown.param_groups) == len(expected.param_groups)
    grown.add_param_group({"params": [("head", model[3].weight)], "use_muon": True})
    assert grown.param_groups[-1]["use_muon"]


@pytest.mark.promise("litgpt", "torchtune", "lightning-cli")
def test_ready_groups_train_as_build_optimizer():
    """LitGPT, torchtune and LightningCLI make it by its path; LitGPT drops what it does not read in the signature."""
    ours, theirs = Net(32, 60), Net(32, 60)
    options = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "adamw_lr": 1e-3, "ns_dtype": "fp32"}
    kind = getattr(importlib.import_module("hf_muon"), "MuonOfGroups")  # noqa: B009
    known = inspect.signature(kind).parameters
    by_its_path = kind(ours.parameters(), **{k: v for k, v in {"fused": True, **options}.items() if k in known})
    assert by_its_path.defaults["lr"] == 1e-2
    tokens = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(1))
    for net, optimizer in ((ours, by_its_path), (theirs, build_optimizer(theirs, **options))):
        for _ in range(3):
            nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(bits(ours.parameters()), bits(theirs.parameters()))


def test_ready_groups_take_options_a_config_a_mapping_and_a_model_that_decides_names():
    """The signature lists the options with their defaults, all of which LightningCLI passes."""
    parameters = inspect.signature(MuonOfGroups).parameters
    assert list(parameters) == ["params", *OPTIONS]
    defaults = {name: parameters[name].default for name in OPTIONS}
    assert defaults == {name: option.default for name, option in OPTIONS.items()} | {"lr": None}
    assert parameters["lr"].annotation == float | None
    net = Net(8, 9)
    expected = summary(build_optimizer(net))
    assert summary(MuonOfGroups(net.parameters())) == summary(MuonOfGroups(net.parameters(), **defaults)) == expected
    outer = nn.ModuleDict({"net": net})
    for config in (MuonConfig(lr=0.5), {"lr": 0.5}):
        assert MuonOfGroups(net.parameters(), config, momentum=0.5).param_groups[0]["lr"] == 0.5
    for options, first in (({"model": net}, "layers.0.weight"), ({}, "net.layers.0.weight")):
        assert MuonOfGroups(outer.parameters(), **options).param_groups[0]["param_names"][0] == first


# --- tensor classes: those of tests/refusals/optimizer.py are refused, and these are not


class Tagged(nn.Parameter):
    """A subclass of Parameter without methods, which only tags a parameter."""


def test_known_subclasses_of_parameter_are_stepped_as_parameters(monkeypatch):
    """Step int8 parameters of bitsandbytes with has_fp16_weights=True, too, which are full matrices."""
    int8 = type("Int8Params", (Behaving,), {"has_fp16_weights": True})
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", SimpleNamespace(Int8Params=int8))
    results = []
    for cls in (nn.Parameter, Tagged, int8):
        optimizer = Muon([weight := cls(torch.ones(4, 6))], lr=0.1)
        for seed in range(2):
            weight.grad = normal(4, 6, seed=seed)
            optimizer.step()
        results.append(weight.detach().as_subclass(torch.Tensor))
    assert equal(results[1:], results[:1] * 2)


@pytest.mark.promise("tensor-class")
def test_frozen_ones_may_be_of_any_class_until_they_are_trained():
    """Ignore the class of a frozen parameter: base weights of quantized models have their own classes."""
    weight, base = nn.Parameter(torch.ones(4, 6)), shard(4, 6, requires_grad=False)
    optimizer = Muon([weight, base])
    weight.grad = torch.randn(4, 6)
    optimizer.step()
    assert not torch.equal(weight, torch.ones(4, 6))
    base.requires_grad_(True).grad = torch.ones(4, 6)
    with pytest.raises(RuntimeError, match=r"\.Shard, .*\[unknown-tensor-class\]"):
        optimizer.step()
    assert not base.any()
