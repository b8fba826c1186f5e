"""LLaMA-Factory v1's plugin on stand-ins for both of its layouts; `tests/e2e` runs the real 0.9.5.

It also compares the stand-ins with the installed LLaMA-Factory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_muon import Muon
from hf_muon.diagnostics.metrics import FILE
from hf_muon.integrations import names
from hf_muon.integrations.llamafactory.v1 import config_from, refuse_unsupported
from tests.e2e.harness import after_torch
from tests.hooks import imported
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, LAYOUTS, NEW, OLD, Net

pytestmark = pytest.mark.newest


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch):
    """Return the registry and the TrainingArguments of a layout, imported under the hooks."""
    return imported_layout(monkeypatch, request.param)


def imported_layout(monkeypatch, layout):
    name, registry, arguments = LAYOUTS[layout]
    module = imported(monkeypatch, {{OLD: NEW, NEW: OLD}[name]: None, name: registry, ARGUMENTS: arguments})
    return SimpleNamespace(plugin=sys.modules[name].OptimizerPlugin, arguments=module.TrainingArguments)


class TestBothLayouts:
    def test_the_plugin_makes_our_optimizer_with_the_run_s_rate(self, layout, caplog):
        caplog.set_level("INFO", "hf_muon")
        args = layout.arguments(learning_rate=3e-3, optim_config={"name": "muon", "weight_decay": 0.1, "momentum": 0.9})
        optimizer = layout.plugin(args.optim_config.name)(Net(), args.optim_config)
        assert type(optimizer) is Muon
        assert {group["lr"] for group in optimizer.param_groups} == {3e-3}
        assert {name: group["use_muon"] for group in optimizer.param_groups for name in group["param_names"]} == {
            "inner.weight": True,
            **dict.fromkeys(("embed.weight", "inner.bias", "lm_head.weight", "lm_head.bias"), False),
        }
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        assert optimizer.param_groups[0]["momentum"] == 0.9

    def test_metrics_go_into_the_output_directory(self, layout, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        muon = {"name": "muon", "diagnostics_every": 1}
        args = layout.arguments(output_dir=str(tmp_path / "run"), optim_config=muon)
        model = Net()
        optimizer = layout.plugin("muon")(model, args.optim_config)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.jsonl")] == [Path("run", FILE)]
        own = layout.arguments(output_dir="run", optim_config={**muon, "diagnostics_file": "mine.jsonl"})
        assert own.optim_config["diagnostics_file"] == "mine.jsonl"

    def test_the_other_optimizers_see_nothing(self, layout):
        args = layout.arguments(optim_config={"name": "adamw", "whatever": 1})
        assert "momentum" not in args.optim_config
        assert layout.arguments().optim_config is None


def test_the_second_name(layout, caplog):
    """Register `hf_muon` beside `muon`, with the same checks; it replaces nothing."""
    caplog.set_level("INFO", "hf_muon")
    options = layout.arguments(learning_rate=3e-3, optim_config={"name": "hf_muon", "weight_decay": 0.1}).optim_config
    torch.manual_seed(0)
    ours = layout.plugin("hf_muon")(Net(), options)
    assert "hf_muon's runs" not in caplog.text
    theirs = {"name": "muon", "lr": 3e-3, "wd": 0.1}  # in the words of LLaMA-Factory's own muon
    groups = layout.plugin("muon")(Net(), theirs).param_groups
    keys = ("param_names", "lr", "weight_decay", "use_muon")
    assert [[g[key] for key in keys] for g in ours.param_groups] == [[g[key] for key in keys] for g in groups]


def test_a_muon_of_theirs_that_does_not_run_is_named(caplog, capsys, monkeypatch):
    names.warn_that_ours_runs.cache_clear()
    counts = []
    for name in LAYOUTS:
        layout = imported_layout(monkeypatch, name)
        caplog.clear()
        layout.plugin("muon")(Net(), {"name": "muon", "lr": 1e-3})
        counts.append(sum("hf_muon's runs" in line and "HF_MUON_AUTOLOAD=0" in line for line in caplog.messages))
    assert counts == [0, 1]
    assert "already registered" not in capsys.readouterr().out


def test_the_rate_in_0_9_5_is_the_run_s_unless_optim_config_has_one(monkeypatch):
    arguments = imported_layout(monkeypatch, "0.9.5").arguments
    assert arguments(learning_rate=2e-5, optim_config={"name": "muon"}).optim_config["lr"] == 2e-5
    own = arguments(learning_rate=2e-5, optim_config={"name": "muon", "lr": 3e-5})
    assert own.optim_config["lr"] == 3e-5


# --- options


def test_the_keys_its_users_know():
    config = config_from(
        {
            "name": "muon",
            "lr": "2e-5",
            "weight_decay": 0.1,
            "momentum": 0.9,
            "nesterov": False,
            "ns_steps": 6,
            "adamw_betas": [0.9, 0.95],
            "adamw_eps": 1e-7,
        }
    )
    assert (config.lr, config.weight_decay, config.momentum, config.nesterov, config.ns_steps) == (
        2e-5,
        0.1,
        0.9,
        False,
        6,
    )
    assert (config.adamw_betas, config.adamw_eps) == ((0.9, 0.95), 1e-7)


# --- refusals


@pytest.mark.parametrize(
    "args",
    [
        {"dist_config": None, "cp_size": 1},
        {"dist_config": {"name": "fsdp2", "cp_mode": "ulysses", "cp_size": 2}},
        {"dist_config": {"name": "fsdp2"}, "cp_size": 2, "cp_mode": "ulysses"},
        {"dist_config": None},
        {"dist_config": {"name": "fsdp2", "offload_params": True}},
    ],
)
def test_not_refused(args):
    refuse_unsupported(SimpleNamespace(**args))


# --- through the import hooks

FLOW = """
import json, sys
from llamafactory.v1.config.training_args import TrainingArguments
args = TrainingArguments(learning_rate=3e-3, optim_config={"name": "muon", "weight_decay": 0.1})
import importlib
plugin = importlib.import_module(sys.argv[1]).OptimizerPlugin(args.optim_config.name)
from torch import nn
optimizer = plugin(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), args.optim_config)
from hf_muon import _autoload
print(json.dumps({"optimizer": type(optimizer).__module__, "lr": optimizer.param_groups[0]["lr"],
                  "states": {hook.module: _autoload.status()[name] for name, hook in _autoload.HOOKS.items()}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_import_torch_alone_brings_it_in(name, tmp_path):
    path, registry, arguments = LAYOUTS[name]
    for module, source in ((path, registry), (ARGUMENTS, arguments)):
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    for folder in (file for file in tmp_path.rglob("*") if file.is_dir()):
        (folder / "__init__.py").touch()
    printed = after_torch.run_code(FLOW, path, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    result = json.loads(printed.strip().splitlines()[-1])
    assert (result["optimizer"], result["lr"]) == ("hf_muon.optimizer.muon", 3e-3)
    assert result["states"][path] == result["states"][ARGUMENTS] == "patched"
    assert result["states"][NEW if path == OLD else OLD] == "waiting for its import"
    assert printed.count("hf_muon's runs, because it is installed") == (name == "newer")
