"""`--opt hf_muon` of timm, on our imitation of its registry of optimizers.

`tests/e2e/test_installed_programs.py` runs timm itself where it is installed, which no environment of `make` does.
"""

from __future__ import annotations

import pkgutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from hf_muon import MuonOfGroups, build_optimizer
from hf_muon.integrations.timm import muon_of_groups, patch_names
from tests.support import hooks

LR, DECAY = 0.01, 0.05


def info(name, opt_class, description="", has_eps=True, has_momentum=False, has_betas=False):
    """Return what a registration sets, by timm's names."""
    return SimpleNamespace(**locals())


class OptimizerRegistry:
    """timm's, in the steps that concern a name: what stands after the last underscore, a class by its path."""

    def __init__(self):
        self._optimizers = {}

    def register(self, info):
        self._optimizers[info.name] = info

    def create_optimizer(self, model_or_params, opt, lr=None, weight_decay=0.0, momentum=0.9, **kwargs):
        params = model_or_params
        if isinstance(params, nn.Module):
            parts = [[p for p in model_or_params.parameters() if (p.ndim > 1) is decays] for decays in (False, True)]
            params = [{"params": parts[0], "weight_decay": 0.0}, {"params": parts[1], "weight_decay": weight_decay}]
            weight_decay = 0.0
        own = self._optimizers[opt.lower().split("_")[-1]]
        kind = pkgutil.resolve_name(own.opt_class) if isinstance(own.opt_class, str) else own.opt_class
        options = {"weight_decay": weight_decay, **({"momentum": momentum} if own.has_momentum else {}), **kwargs}
        return kind(params, **options, **({} if lr is None else {"lr": lr}))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.fixture
def factory(monkeypatch):
    """Return timm.optim._optim_factory with a muon of its own."""
    module = ModuleType("timm.optim._optim_factory")
    module.OptimInfo, module.OptimizerRegistry, module.default_registry = info, OptimizerRegistry, OptimizerRegistry()
    module.default_registry.register(info("muon", lambda params, **options: SimpleNamespace(kind="theirs")))
    module.default_registry.register(info("adamw", lambda params, **options: "adamw"))

    def create_optimizer_v2(model_or_params, opt="sgd", lr=None, weight_decay=0.0, momentum=0.9, **kwargs):
        return module.default_registry.create_optimizer(model_or_params, opt, lr, weight_decay, momentum, **kwargs)

    create_optimizer_v2.__module__ = module.__name__
    module.create_optimizer_v2 = create_optimizer_v2
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def patched(factory):
    assert factory.create_optimizer_v2(network(), "hf_muon").kind == "theirs"  # without the patch
    package = ModuleType("timm.optim")
    package.create_optimizer_v2 = factory.create_optimizer_v2
    with hooks.patched(patch_names, package):
        assert factory.create_optimizer_v2 is package.create_optimizer_v2
        yield package


@pytest.mark.promise("timm")
def test_a_run_equals_build_optimizer_and_options_and_groups_arrive(patched):
    words = {"betas": (0.9, 0.95), "eps": 1e-6, "ns_dtype": "fp32"}
    trained = []
    for create in (
        lambda model: patched.create_optimizer_v2(model, "HF_Muon", LR, DECAY, momentum=0.8, **words),
        lambda model: build_optimizer(
            model, lr=LR, weight_decay=DECAY, momentum=0.8, adamw_betas=(0.9, 0.95), adamw_eps=1e-6, ns_dtype="fp32"
        ),
    ):
        model = network()
        optimizer = create(model)
        for group in optimizer.param_groups:
            assert (group["lr"], group["momentum"], group["adamw_eps"]) == (LR, 0.8, 1e-6)
            assert group["adamw_betas"] == (0.9, 0.95)
            assert {group["weight_decay"]} == {DECAY if p.ndim > 1 else 0.0 for p in group["params"]}
        for _ in range(3):
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    assert isinstance(patched.create_optimizer_v2(network(), "hf_muon", LR), MuonOfGroups)
    for name in ("muon", "lookahead_muon"):
        assert patched.create_optimizer_v2(network(), name).kind == "theirs"


def test_fallback_goes_to_adamw_and_rate_scales_are_kept():
    model = network()  # it has to live: groups find it
    first, *rest = weights = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": [first], "lr_scale": 0.25, "use_fallback": True},
        {"params": rest, "lr_scale": 0.5, "use_fallback": False},
    ]
    optimizer = muon_of_groups(groups, lr=LR)
    of = {p: (group["use_muon"], group["lr_scale"]) for group in optimizer.param_groups for p in group["params"]}
    assert [of[p] for p in weights] == [(False, 0.25), (True, 0.5), (True, 0.5)]
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["default_registry", "OptimInfo"])
def test_a_registry_that_is_gone_is_refused_by_the_hook(patched, factory, name):
    """Expect no Muon of timm's in silence, and other optimizers as ever."""
    create = patched.create_optimizer_v2
    registry = vars(factory).pop(name)
    with pytest.raises(RuntimeError, match=r"hook 'timm' into timm\.optim is not in place \(AttributeError"):
        create(network(), "hf_muon")
    setattr(factory, name, registry)
    assert create(network(), opt="adamw") == create(model_or_params=network(), opt="adamw") == "adamw"
