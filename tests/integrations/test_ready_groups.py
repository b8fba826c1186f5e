"""Optimizers over param groups that a caller passes in place of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_muon import build_optimizer
from hf_muon.ready_groups import MuonOfGroups
from tests.integrations.plain_script import LR, InOrder, dataset, model, sentences
from tests.integrations.trainer_runs import arguments, by_hand, lora
from tests.reference import relative_difference


class TestReadyMadeGroups:
    """`cls(param_groups, **kwargs)`, as LLaMA-Factory's PPO and LoRA+ call the class that transformers returns."""

    def build(self, tmp_path, groups, **options):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, **options))
        optimizer = cls(groups, **kwargs)
        assert isinstance(optimizer, MuonOfGroups)
        return optimizer

    def test_decay_and_no_decay_groups(self, tmp_path):
        network = model()
        decaying = Trainer.get_decay_parameter_names(None, network)
        groups = [
            {"params": [p for n, p in network.named_parameters() if n not in decaying], "weight_decay": 0.0},
            {"params": [p for n, p in network.named_parameters() if n in decaying], "weight_decay": 0.1},
        ]
        optimizer = self.build(tmp_path, groups)
        expected = build_optimizer(network, lr=LR, weight_decay=0.1)
        groups = {
            name: (g["use_muon"], g["lr"], g["weight_decay"])
            for g in optimizer.param_groups
            for name in g["param_names"]
        }
        assert groups == {
            name: (g["use_muon"], g["lr"], g["weight_decay"])
            for g in expected.param_groups
            for name in g["param_names"]
        }

    def test_groups_without_decay_follow_the_rule(self, tmp_path):
        network = model()
        optimizer = self.build(tmp_path, list(network.parameters()))
        decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
        assert decays["model.norm.weight"] == 0.0
        assert decays["model.embed_tokens.weight"] == decays["model.layers.0.mlp.up_proj.weight"] == 0.1

    def test_own_rates_are_kept_in_proportion(self, tmp_path):
        network = lora()
        parts = {x: [p for n, p in network.named_parameters() if f"lora_{x}" in n] for x in "AB"}
        groups = [{"params": parts["A"], "lr": LR}, {"params": parts["B"], "lr": 16 * LR}, {"params": []}]
        optimizer = self.build(tmp_path, groups, optim_args=f"lora=muon,muon_lr={LR / 2}")
        assert [(g["use_muon"], g["lr"]) for g in optimizer.param_groups] == [(True, LR / 2), (True, 8 * LR)]

    def test_steps_as_the_built_one(self, tmp_path):
        one, other = model(), model()
        optimizers = [self.build(tmp_path, list(one.parameters())), build_optimizer(other, lr=LR, weight_decay=0.1)]
        batch = sentences()[:4]
        for network, optimizer in zip((one, other), optimizers, strict=True):
            for _ in range(3):
                network(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    def test_flat_list_gives_the_groups_of_build_optimizer(self, tmp_path):
        network = model()
        groups = self.build(tmp_path, network.parameters()).param_groups
        expected = build_optimizer(network, lr=LR, weight_decay=0.1).param_groups
        assert [g["param_names"] for g in groups] == [g["param_names"] for g in expected]

    def test_decay_of_the_halves(self, tmp_path):
        network = model()
        groups = [{"params": list(network.parameters()), "weight_decay": 0.2}]
        rows = self.build(tmp_path, groups, optim_args="adamw_weight_decay=0.4").param_groups
        assert [(g["use_muon"], g["weight_decay"]) for g in rows] == [(True, 0.2), (False, 0.4)]
        groups = [{"params": list(network.parameters()), "weight_decay": 0.0}]
        rows = self.build(tmp_path, groups, optim_args="adamw_weight_decay=0.4").param_groups
        assert [g["weight_decay"] for g in rows] == [0.0, 0.0]

    def test_other_keys_of_a_group_are_kept_or_refused(self, tmp_path):
        network = model()
        weight = network.model.layers[0].mlp.up_proj.weight
        assert self.build(tmp_path, [{"params": weight, "momentum": 0.5}]).param_groups[0]["momentum"] == 0.5
        with pytest.raises(ValueError, match=r"'betas' is not an option of muon. Did you mean 'adamw_betas'\?"):
            self.build(tmp_path, [{"params": weight, "betas": (0.9, 0.9)}])

    def test_parameters_of_no_model(self, tmp_path):
        with pytest.raises(RuntimeError, match=r"shapes \[\(4, 4\)\].*no live model holds them. Use hf_muon.build"):
            self.build(tmp_path, [nn.Parameter(torch.randn(4, 4))])

    def test_through_the_trainer(self, tmp_path):
        """Pass the Trainer's own groups to the class, by `optimizer_cls_and_kwargs`."""
        start, ours, theirs = model(), model(), model()
        args = arguments(tmp_path)
        pair = Trainer.get_optimizer_cls_and_kwargs(args)
        InOrder(ours, args, train_dataset=dataset(), optimizer_cls_and_kwargs=pair).train()
        by_hand(theirs)
        assert relative_difference(list(start.parameters()), list(theirs.parameters()), list(ours.parameters())) < 1e-6
