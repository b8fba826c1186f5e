"""Optimizers over param groups that a caller passes in place of a model."""

from __future__ import annotations

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
from tests.integrations.trainer_runs import arguments, by_hand, lora
from tests.reference import relative_difference

pytestmark = pytest.mark.newest


class TestReadyMadeGroups:
    """`cls(param_groups, **kwargs)`, as LLaMA-Factory's PPO and LoRA+ call the class that transformers returns."""

    def build(self, tmp_path, groups, **options):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, **options))
        optimizer = cls(groups, **kwargs)
        assert isinstance(optimizer, MuonOfGroups)
        return optimizer

    def test_parameters_alone_give_the_groups_of_build_optimizer(self, tmp_path):
        network = model()
        optimizer = self.build(tmp_path, network.parameters())
        expected = build_optimizer(network, lr=LR, weight_decay=0.1)
        assert [g["param_names"] for g in optimizer.param_groups] == [g["param_names"] for g in expected.param_groups]
        decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
        assert decays["model.norm.weight"] == 0.0
        assert decays["model.embed_tokens.weight"] == decays["model.layers.0.mlp.up_proj.weight"] == 0.1

    def test_own_rates_are_kept_in_proportion(self, tmp_path):
        network = lora()
        parts = {x: [p for n, p in network.named_parameters() if f"lora_{x}" in n] for x in "AB"}
        groups = [{"params": parts["A"], "lr": LR}, {"params": parts["B"], "lr": 16 * LR}, {"params": []}]
        optimizer = self.build(tmp_path, groups, optim_args=f"lora=muon,muon_lr={LR / 2}")
        assert [(g["use_muon"], g["lr"]) for g in optimizer.param_groups] == [(True, LR / 2), (True, 8 * LR)]

    def test_decay_of_the_halves(self, tmp_path):
        network = model()
        groups = [{"params": list(network.parameters()), "weight_decay": 0.2}]
        rows = self.build(tmp_path, groups, optim_args="adamw_weight_decay=0.4").param_groups
        assert [(g["use_muon"], g["weight_decay"]) for g in rows] == [(True, 0.2), (False, 0.4)]
        groups = [{"params": list(network.parameters()), "weight_decay": 0.0}]
        rows = self.build(tmp_path, groups, optim_args="adamw_weight_decay=0.4").param_groups
        assert [g["weight_decay"] for g in rows] == [0.0, 0.0]

    def test_other_keys_of_a_group_are_kept(self, tmp_path):
        network = model()
        weight = network.model.layers[0].mlp.up_proj.weight
        assert self.build(tmp_path, [{"params": weight, "momentum": 0.5}]).param_groups[0]["momentum"] == 0.5

    def test_through_the_trainer(self, tmp_path):
        """Pass the Trainer's own groups to the class, by `optimizer_cls_and_kwargs`."""
        start, ours, theirs = model(), model(), model()
        args = arguments(tmp_path)
        pair = Trainer.get_optimizer_cls_and_kwargs(args)
        InOrder(ours, args, train_dataset=dataset(), optimizer_cls_and_kwargs=pair).train()
        by_hand(theirs)
        assert relative_difference(list(start.parameters()), list(theirs.parameters()), list(ours.parameters())) < 1e-6


def layers() -> nn.Sequential:
    """Return two hidden matrices and an output, all with biases."""
    return nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Linear(8, 8), lm_head=nn.Linear(8, 30)))


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    return {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}


def by_class(parameters, routing_model, **options):
    return MuonOfGroups(parameters, model=routing_model, **options)


def by_handler(parameters, routing_model, **options):
    return MuonFactory()(routing_model, routing_model=routing_model, params=parameters, **options)


class TestRates:
    """The rates of groups against the formula of docs/programs.md."""

    @pytest.mark.parametrize("make", [by_class, MuonFactory, by_handler])
    @pytest.mark.parametrize("lr", [None, 1e-4, 2e-5])
    @pytest.mark.parametrize("muon_lr", [None, 7e-4])
    @pytest.mark.parametrize("adamw_lr", [None, 3e-6])
    def test_what_is_passed_comes_before_the_rate_of_a_group(self, make, lr, muon_lr, adamw_lr):
        net, given = layers(), {"lr": lr, "muon_lr": muon_lr, "adamw_lr": adamw_lr}
        options = {name: rate for name, rate in given.items() if rate is not None}
        for own in (2e-5, None):
            group = {"params": list(net.parameters()), **({"lr": own} if own else {})}
            found = rates(make([group], routing_model=net, **options))
            assert len(found) == 6
            for name, rate in found.items():
                passed = muon_lr if name in ("a.weight", "b.weight") else adamw_lr
                expected = (own or lr or 1e-3) if passed is None else passed * (own / lr if own and lr else 1)
                assert rate == pytest.approx(expected, rel=1e-15)

    def test_without_groups(self):
        for options in ({"muon_lr": 7e-4}, {"muon_lr": 7e-4, "lr": 1e-4}, {"muon_lr": 7e-4, "adamw_lr": 3e-6}):
            adamw = options.get("adamw_lr", options.get("lr", 1e-3))
            net = layers()
            for optimizer in (build_optimizer(net, **options), MuonOfGroups(net.parameters(), **options)):
                assert set(rates(optimizer).items()) >= {
                    ("a.weight", 7e-4),
                    ("b.weight", 7e-4),
                    ("lm_head.weight", adamw),
                }

    def test_one_rate_does_not_make_different_ones_equal(self):
        net = layers()
        groups = [{"params": net[0].parameters(), "lr": 1e-5}, {"params": net[1:].parameters(), "lr": 2e-5}]
        groups = [{**group, "params": list(group["params"])} for group in groups]
        found = rates(MuonOfGroups(groups, model=net, muon_lr=1e-4, lr=4e-5))
        assert found == pytest.approx(
            {
                "a.weight": 2.5e-5,
                "a.bias": 1e-5,
                "b.weight": 5e-5,
                "b.bias": 2e-5,
                "lm_head.weight": 2e-5,
                "lm_head.bias": 2e-5,
            }
        )

    def test_rates_of_groups_that_have_no_such_part_do_not_matter(self):
        net = layers()
        groups = [{"params": [net[0].weight, net[1].weight], "lr": 1e-5}, {"params": [net[2].weight], "lr": 2e-5}]
        assert rates(MuonOfGroups(groups, model=net, muon_lr=1e-4)) == {
            "a.weight": 1e-4,
            "b.weight": 1e-4,
            "lm_head.weight": 2e-5,
        }


class TestKeysOfTorch:
    """Arguments and groups as programs write them for torch.optim.AdamW."""

    DEFAULTS = {
        **dict.fromkeys(("foreach", "fused")),
        **dict.fromkeys(("capturable", "differentiable", "maximize", "amsgrad"), False),
    }

    @pytest.mark.promise("lightning", "plain-loop")
    @pytest.mark.parametrize("flags", [DEFAULTS, dict.fromkeys(DEFAULTS, False)], ids=["defaults", "false"])
    @pytest.mark.parametrize("where", ["arguments", "group"])
    def test_steps_as_with_our_names(self, where, flags):
        """Name the class by its path, as LitGPT, torchtune and LightningCLI do; step with a closure, as Lightning."""
        nets = [layers(), layers()]
        nets[1].load_state_dict(nets[0].state_dict())
        kind = pkgutil.resolve_name("hf_muon.MuonOfGroups")
        keys = {"betas": [0.8, 0.9], "eps": 1e-3, **flags}
        options = {"lr": 0.1, "weight_decay": 0.0}
        if where == "arguments":
            ours = kind(nets[0].parameters(), **options, **keys)
        else:
            ours = kind([{"params": list(nets[0].parameters()), **options, **keys}])
        assert not set(keys) & {key for group in ours.param_groups for key in group}
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
