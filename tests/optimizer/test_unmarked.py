"""Parameters without a model: what `Muon` warns of, and `MuonOfGroups` for programs that name a class by its path."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn

import hf_muon
from hf_muon import Muon, MuonConfig, MuonOfGroups, build_optimizer
from hf_muon.config import OPTIONS
from hf_muon.optimizer.unmarked import SMALLEST


class Net(nn.Module):
    """A model without norms and biases, all of whose parameters are matrices."""

    def __init__(self, width=256, tokens=800):
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


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


GROUPS = {
    "parameters": lambda net: net.parameters(),
    "names": lambda net: net.named_parameters(),
    "matrices": lambda net: [p for p in net.parameters() if p.ndim == 2],
    "a group with a rate": lambda net: [{"params": list(net.parameters()), "lr": 1e-3}],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_embeddings_and_heads_are_named_once(caplog, groups):
    net = Net()
    Muon(groups(net))
    (message,) = warnings(caplog)
    assert "among these are wte.weight (name contains 'wte'), lm_head.weight (name contains 'lm_head')." in message
    assert "hf_muon.build_optimizer(model), or hf_muon.MuonOfGroups" in message
    assert "write use_muon: True into their group" in message


def test_a_tied_head(caplog):
    net = Net()
    net.lm_head.weight = net.wte.weight
    Muon([p for p in net.parameters() if p.ndim == 2])
    (message,) = warnings(caplog)
    assert message.count(".weight (") == 1


SILENT = {
    "asked for": lambda net: [{"params": list(net.parameters()), "use_muon": True}],
    "hidden matrices": lambda net: list(net.layers.parameters()),
    "AdamW": lambda net: [{"params": list(net.parameters()), "use_muon": False}],
    "of no module": lambda net: [nn.Parameter(torch.zeros(800, 200))],
}


@pytest.mark.parametrize("groups", SILENT.values(), ids=SILENT)
def test_no_warning(caplog, groups):
    net = Net()
    assert sum(p.numel() for p in net.parameters()) > SMALLEST
    Muon(groups(net))
    assert warnings(caplog) == []


def test_no_search_for_small_models(caplog):
    net = Net(width=16, tokens=40)
    Muon(net.parameters())
    assert warnings(caplog) == []


def test_build_optimizer_and_ready_groups_do_not_warn(caplog):
    net = Net()
    build_optimizer(net)
    MuonOfGroups(net.parameters())
    assert warnings(caplog) == []


class TestByPath:
    """`MuonOfGroups` as LitGPT, torchtune and LightningCLI make it: by its path, with parameters and keywords."""

    def make(self, path, parameters, **options):
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        known = inspect.signature(kind).parameters  # LitGPT drops what it does not read there
        return kind(parameters, **{key: value for key, value in options.items() if key in known})

    def test_trains_as_build_optimizer(self):
        ours, theirs = Net(), Net()
        options = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "adamw_lr": 1e-3, "ns_dtype": "fp32"}
        optimizers = [
            self.make("hf_muon.MuonOfGroups", ours.parameters(), fused=True, **options),
            build_optimizer(theirs, **options),
        ]
        assert optimizers[0].defaults["lr"] == 1e-2
        tokens = torch.randint(0, 800, (2, 8), generator=torch.Generator().manual_seed(1))
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            for _ in range(3):
                nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))

    def test_needs_no_options(self):
        net = Net()
        groups = MuonOfGroups(net.parameters()).param_groups
        assert {group["lr"] for group in groups} == {1e-3}

    def test_signature_lists_the_options_with_their_defaults(self):
        parameters = inspect.signature(hf_muon.MuonOfGroups).parameters
        assert list(parameters) == ["params", *OPTIONS]
        expected = {name: option.default for name, option in OPTIONS.items()} | {"lr": None}
        assert {name: parameters[name].default for name in OPTIONS} == expected
        assert parameters["lr"].annotation == float | None

    def test_every_default_may_be_passed(self):
        """LightningCLI passes all defaults."""
        net = Net()
        signature = inspect.signature(hf_muon.MuonOfGroups).parameters
        optimizer = MuonOfGroups(net.parameters(), **{name: signature[name].default for name in OPTIONS})
        expected = build_optimizer(net)
        assert [g["param_names"] for g in optimizer.param_groups] == [g["param_names"] for g in expected.param_groups]

    def test_a_config_or_a_mapping(self):
        net = Net()
        for config in (MuonConfig(lr=0.5), {"lr": 0.5}):
            assert MuonOfGroups(net.parameters(), config, momentum=0.5).param_groups[0]["lr"] == 0.5
        with pytest.raises(ValueError, match="config is a MuonConfig or a mapping of its options, not"):
            MuonOfGroups(net.parameters(), 0.5)

    def test_the_model_decides_names(self):
        net = Net()
        outer = nn.ModuleDict({"net": net, "other": nn.Linear(4, 4)})
        names = [n for g in MuonOfGroups(net.parameters(), model=net).param_groups for n in g["param_names"]]
        assert "layers.0.weight" in names
        names = [n for g in MuonOfGroups(net.parameters()).param_groups for n in g["param_names"]]
        assert "net.layers.0.weight" in names
        assert outer
