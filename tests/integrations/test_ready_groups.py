"""Optimizers over param groups that a caller passes in place of a model."""

from __future__ import annotations

import itertools
import pkgutil
from collections import OrderedDict

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_muon import build_optimizer
from hf_muon.integrations.transformers.handler import MuonFactory
from hf_muon.ready_groups import MuonOfGroups
from tests.integrations.plain_script import LR, InOrder, dataset, model
from tests.integrations.trainer_runs import arguments, by_hand
from tests.support.reference import relative_difference

# --- `cls(param_groups, **kwargs)`, as LLaMA-Factory's PPO and LoRA+ call the class that transformers returns


def test_parameters_alone_give_the_groups_of_build_optimizer(tmp_path):
    """Pass them to the class, and the Trainer's own groups by `optimizer_cls_and_kwargs`."""
    start, ours, theirs = model(), model(), model()
    args = arguments(tmp_path)
    cls, kwargs = pair = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer, expected = cls(ours.parameters(), **kwargs), build_optimizer(ours, lr=LR, weight_decay=0.1)
    assert isinstance(optimizer, MuonOfGroups)
    for a, b in zip(optimizer.param_groups, expected.param_groups, strict=True):
        assert all(a[key] == b[key] for key in ("param_names", "weight_decay", "use_muon", "lr"))
    InOrder(ours, args, train_dataset=dataset(), optimizer_cls_and_kwargs=pair).train()
    by_hand(theirs)
    assert relative_difference(list(start.parameters()), list(theirs.parameters()), list(ours.parameters())) < 1e-6


def test_keys_of_a_group_are_kept_and_decays_of_the_halves(tmp_path):
    network = model()
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim_args="adamw_weight_decay=0.4"))
    for decay, expected in ((0.2, [(True, 0.2), (False, 0.4)]), (0.0, [(True, 0.0), (False, 0.0)])):
        group = {"params": list(network.parameters()), "weight_decay": decay, "momentum": 0.5}
        rows = cls([group], **kwargs).param_groups
        assert [(g["use_muon"], g["weight_decay"]) for g in rows] == expected
        assert rows[0]["momentum"] == 0.5


# --- rates of groups, against the formula of docs/programs.md


def layers() -> nn.Sequential:
    """Return two hidden matrices and an output, all with biases."""
    return nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Linear(8, 8), lm_head=nn.Linear(8, 30)))


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    return {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}


def by_class(parameters, routing_model, **options):
    return MuonOfGroups(parameters, model=routing_model, **options)


def by_handler(parameters, routing_model, **options):
    return MuonFactory()(routing_model, routing_model=routing_model, params=parameters, **options)


@pytest.mark.parametrize("make", [by_class, MuonFactory, by_handler])
def test_rates_that_are_passed_come_before_the_rate_of_a_group(make):
    net = layers()
    for lr, muon_lr, adamw_lr, own in itertools.product((None, 1e-4, 2e-5), (None, 7e-4), (None, 3e-6), (2e-5, None)):
        given = {"lr": lr, "muon_lr": muon_lr, "adamw_lr": adamw_lr}
        options = {name: rate for name, rate in given.items() if rate is not None}
        group = {"params": list(net.parameters()), **({"lr": own} if own else {})}
        found = rates(make([group], routing_model=net, **options))
        assert len(found) == 6
        for name, rate in found.items():
            passed = muon_lr if name in ("a.weight", "b.weight") else adamw_lr
            expected = (own or lr or 1e-3) if passed is None else passed * (own / lr if own and lr else 1)
            assert rate == pytest.approx(expected, rel=1e-15)
        if own is None:  # as without groups
            assert found == rates(build_optimizer(net, **options)) == rates(MuonOfGroups(net.parameters(), **options))


def test_one_rate_does_not_make_different_ones_equal_and_those_of_the_other_half_do_not_matter():
    net = layers()
    groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in ((net[0], 1e-5), (net[1:], 2e-5))]
    found = rates(MuonOfGroups(groups, model=net, muon_lr=1e-4, lr=4e-5))
    others = {"a.bias": 1e-5, "b.bias": 2e-5, "lm_head.weight": 2e-5, "lm_head.bias": 2e-5}
    assert found == pytest.approx({"a.weight": 2.5e-5, "b.weight": 5e-5, **others})
    groups = [{"params": [net[0].weight, net[1].weight], "lr": 1e-5}, {"params": [net[2].weight], "lr": 2e-5}]
    expected = {"a.weight": 1e-4, "b.weight": 1e-4, "lm_head.weight": 2e-5}
    assert rates(MuonOfGroups(groups, model=net, muon_lr=1e-4)) == expected


# --- arguments and groups as programs write them for torch.optim.AdamW

OFF = {
    **dict.fromkeys(("foreach", "fused")),
    **dict.fromkeys(("capturable", "differentiable", "maximize", "amsgrad"), False),
}


@pytest.mark.promise("lightning", "plain-loop")
@pytest.mark.parametrize("flags", [OFF, dict.fromkeys(OFF, False)], ids=["defaults", "false"])
@pytest.mark.parametrize("where", ["arguments", "group"])
def test_steps_as_with_our_names(where, flags):
    """Name the class by its path, as LitGPT, torchtune and LightningCLI do; step with a closure, as Lightning."""
    nets = [layers(), layers()]
    nets[1].load_state_dict(nets[0].state_dict())
    kind = pkgutil.resolve_name("hf_muon.MuonOfGroups")
    keys = {"betas": [0.8, 0.9], "eps": 1e-3, "lr": 0.1, "weight_decay": 0.0, **flags}
    params = list(nets[0].parameters())
    ours = kind(params, **keys) if where == "arguments" else kind([{"params": params, **keys}])
    assert not {"betas", "eps", *flags} & {key for group in ours.param_groups for key in group}
    theirs = build_optimizer(nets[1], lr=0.1, adamw_betas=(0.8, 0.9), adamw_eps=1e-3)

    def loss_of(net, optimizer):
        optimizer.zero_grad()
        loss = net(torch.ones(4, 8)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        expected = loss_of(nets[1], theirs)
        theirs.step()
        assert ours.step(lambda: loss_of(nets[0], ours)) == expected
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))


def test_groups_without_matrices_are_refused():
    net = layers()
    for group in ({"params": net.parameters(), "use_muon": False}, {"params": net.lm_head.parameters()}):
        with pytest.raises(ValueError, match=r"\[nothing-for-muon\]"):
            MuonOfGroups([group], model=net)
