"""LLaMA-Factory v1's plugin on stand-ins for both of its layouts; `tests/e2e` runs the real 0.9.5.

The last test compares the stand-ins with the installed LLaMA-Factory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_muon import Muon, build_optimizer
from hf_muon.diagnostics.metrics import FILE
from hf_muon.integrations import names
from hf_muon.integrations.llamafactory.v1 import config_from, refuse_unsupported
from hf_muon.rules.normalize import SECOND_MOMENT
from tests.hooks import imported
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, LAYOUTS, NEW, OLD, Net


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

    def test_a_wrong_key_is_found_with_the_arguments(self, layout):
        with pytest.raises(ValueError, match=r"'momentun' is not an option of muon. Did you mean 'momentum'\? Valid: "):
            layout.arguments(optim_config={"name": "muon", "momentun": 0.9})


def test_the_second_name(layout, caplog):
    """Register `hf_muon` beside `muon`, with the same checks; it replaces nothing."""
    caplog.set_level("INFO", "hf_muon")
    with pytest.raises(ValueError, match="'momentun' is not an option of muon"):
        layout.arguments(optim_config={"name": "hf_muon", "momentun": 0.9})
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1}, "'beta' is not an option of muon.* Valid: lr, weight_decay, "),
        ({"wd": 0.1, "weight_decay": 0.2}, "'wd' is not an option of muon.* Valid: lr, weight_decay, "),
        ({"ns_steps": 0}, "ns_steps=0 is not valid. Valid: auto, or an integer from 1 to 99"),
        ({"weight_decay": -1}, "weight_decay=-1 is not valid"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        config_from({"name": "muon", "lr": 1e-3, **options})


# --- refusals


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"dist_config": None, "cp_size": 2}, ValueError, r"cp_size: 2 needs dist_config: \{name: fsdp2\}"),
        ({"dist_config": {"name": "other", "cp_size": 4}}, ValueError, "cp_size: 4 needs dist_config"),
        ({"dist_config": {"name": "deepspeed"}}, RuntimeError, "dist_config: deepspeed in this version"),
        ({"dist_config": {"name": "fsdpturbo"}, "cp_size": 1}, RuntimeError, "dist_config: fsdpturbo in this version"),
    ],
)
def test_refused_with_the_arguments(args, error, message):
    with pytest.raises(error, match=message):
        refuse_unsupported(SimpleNamespace(**args))


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_import_torch_alone_brings_it_in(name, tmp_path):
    path, registry, arguments = LAYOUTS[name]
    for module, source in ((path, registry), (ARGUMENTS, arguments)):
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    for folder in (file for file in tmp_path.rglob("*") if file.is_dir()):
        (folder / "__init__.py").touch()
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-c", "import torch\n" + FLOW, path],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.strip().splitlines()[-1])
    assert (result["optimizer"], result["lr"]) == ("hf_muon.optimizer.muon", 3e-3)
    assert result["states"][path] == result["states"][ARGUMENTS] == "patched"
    assert result["states"][NEW if path == OLD else OLD] == "waiting for its import"
    assert process.stderr.count("hf_muon's runs, because it is installed") == (name == "newer")


# --- the installed LLaMA-Factory


@pytest.mark.skipif(importlib.util.find_spec("llamafactory") is None, reason="llamafactory is not installed")
def test_the_installed_llamafactory_is_one_of_the_two_layouts():
    code = f"""
import dataclasses, importlib.util, json
parents = [name for name in {[OLD, NEW]!r} if importlib.util.find_spec(name.rpartition(".")[0])]
spec = [name for name in parents if importlib.util.find_spec(name)]
from llamafactory.v1.config.training_args import TrainingArguments
module = importlib.import_module(spec[0])
from hf_muon import _autoload
fields = [field.name for field in dataclasses.fields(TrainingArguments)]
states = {{hook.module: _autoload.status()[name] for name, hook in _autoload.HOOKS.items()}}
print(json.dumps([spec, fields, states, type(module.OptimizerPlugin._registry["muon"]).__name__]))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path.home())
    assert process.returncode == 0, process.stderr
    layouts, fields, states, entry = json.loads(process.stdout.strip().splitlines()[-1])
    assert len(layouts) == 1
    assert states[layouts[0]] == states[ARGUMENTS] == "patched"
    assert {"learning_rate", "dist_config", "optim_config"} <= set(fields)
    assert ("cp_size" in fields, entry) == {OLD: (False, "dict"), NEW: (True, "function")}[layouts[0]]


@pytest.mark.skipif(importlib.util.find_spec("llamafactory") is None, reason="llamafactory is not installed")
def test_a_checkpoint_of_fsdp2_loads_with_a_rule_switched_on(tmp_path):
    """Compare with the whole state; LLaMA-Factory's own functions save and load, in one process."""
    fsdp2 = importlib.import_module("llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2")
    model = Net()
    optimizer = build_optimizer(model, lr=3e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    fsdp2.save_checkpoint(model, optimizer, str(tmp_path))
    states = []
    for load in (
        lambda other, muon: fsdp2.load_checkpoint(other, muon, str(tmp_path)),
        lambda other, muon: muon.load_state_dict(optimizer.state_dict()),
    ):
        other = Net()
        muon = build_optimizer(other, lr=3e-3, normalize="rows")
        load(other, muon)
        muon.init_state()
        states.append(muon.state_dict()["state"])
    loaded, expected = states
    assert any(SECOND_MOMENT in own for own in loaded.values())
    for key, own in expected.items():
        assert own.keys() == loaded[key].keys()
        assert all(torch.equal(loaded[key][name], value) for name, value in own.items())
