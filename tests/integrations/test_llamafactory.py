"""Our imitation of LLaMA-Factory: v0's parser, and v1's plugins in both layouts. `tests/e2e` runs the real ones."""

from __future__ import annotations

import re
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hf_muon import Muon
from hf_muon._autoload import HOOKS, status
from hf_muon.diagnostics.log import FILE
from hf_muon.integrations import names
from hf_muon.integrations.llamafactory.v0 import patch_parser
from hf_muon.integrations.llamafactory.v1 import refuse_unsupported
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS, CHECKPOINTS, NEW, OLD, SHARDS, V1, Net
from tests.support.hooks import imported, patched

# --- v0: the check of arguments


def test_runs_are_checked_in_modules_that_have_imported_the_parser_already(monkeypatch):
    def get_train_args(optim, **finetuning):
        return SimpleNamespace(optim=optim), SimpleNamespace(finetuning_type="full", **finetuning)

    parser, tuner = ModuleType("llamafactory.hparams.parser"), ModuleType("llamafactory.train.tuner")
    for module in (parser, tuner):
        module.get_train_args = get_train_args
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with patched(patch_parser, parser):
        for module in (parser, tuner):
            assert module.get_train_args("adamw_torch")
            with pytest.raises(ValueError, match="use_muon: true would replace"):
                module.get_train_args("muon", use_muon=True)


def test_a_parser_that_returns_something_else():
    """Expect it untouched, unless a run asks for Muon."""
    parser = ModuleType("llamafactory.hparams.parser")
    for result in (None, 3, {}, (), ({}, 1), [SimpleNamespace(optim="adamw_torch")]):
        parser.get_train_args = lambda result=result: result
        with patched(patch_parser, parser):
            assert parser.get_train_args() is result
    parser.get_train_args = lambda: (SimpleNamespace(optim="muon"),)
    with patched(patch_parser, parser), pytest.raises(RuntimeError, match='hook "LLaMA-Factory\'s parser"'):
        parser.get_train_args()


# --- v1: the plugin


@pytest.fixture(params=V1)
def layout(request, monkeypatch):
    return imported_layout(monkeypatch, request.param)


def imported_layout(monkeypatch, name):
    """Return the registry and the TrainingArguments of a layout, imported under the hooks."""
    imported(monkeypatch, V1[name])
    plugins = sys.modules[OLD] or sys.modules[NEW]
    return SimpleNamespace(plugin=plugins.OptimizerPlugin, arguments=sys.modules[ARGUMENTS].TrainingArguments)


def test_the_plugin_makes_our_optimizer_with_the_run_s_rate(layout, caplog):
    """Expect `muon` to be the same optimizer where LLaMA-Factory has none of that name."""
    for name in ("hf_muon",) if names.TAKEN[names.V1] else ("hf_muon", "muon"):
        options = {"name": name, "weight_decay": 0.1, "momentum": 0.9}
        args = layout.arguments(learning_rate=3e-3, optim_config=options)
        optimizer = layout.plugin(args.optim_config.name)(Net(), args.optim_config)
        assert type(optimizer) is Muon
        assert {group["lr"] for group in optimizer.param_groups} == {3e-3}
        assert {name: group["use_muon"] for group in optimizer.param_groups for name in group["param_names"]} == {
            "inner.weight": True,
            **dict.fromkeys(("embed.weight", "inner.bias", "lm_head.weight", "lm_head.bias"), False),
        }
        assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)
    assert "another-muon" not in caplog.text
    same = layout.plugin("hf_muon")(Net(), {"name": "hf_muon", "lr": 3e-3, "wd": 0.1})  # as LLaMA-Factory's muon has it
    assert same.param_groups[0]["weight_decay"] == 0.1


def test_metrics_go_into_the_output_directory(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    muon = {"name": "hf_muon", "diagnostics_every": 1}
    args = layout.arguments(output_dir=str(tmp_path / "run"), optim_config=muon)
    model = Net()
    optimizer = layout.plugin("hf_muon")(model, args.optim_config)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.jsonl")] == [Path("run", FILE)]
    own = layout.arguments(output_dir="run", optim_config={**muon, "diagnostics_file": "mine.jsonl"})
    assert own.optim_config["diagnostics_file"] == "mine.jsonl"


def test_the_other_optimizers_see_nothing(layout):
    args = layout.arguments(optim_config={"name": "adamw", "whatever": 1})
    assert {"name", "whatever"} <= args.optim_config.keys() <= {"name", "whatever", "lr"}  # newer sources add lr
    assert layout.arguments().optim_config is None


def test_a_muon_of_llamafactory_s_own_is_what_muon_means_there(caplog, capsys, monkeypatch):
    """Give it options that ours does not have: nobody checks or completes them, and one warning names `hf_muon`."""
    names.warn_once.cache_clear()
    layout = imported_layout(monkeypatch, "newer")
    options = {"name": "muon", "of_theirs": 1}
    for _ in range(2):
        args = layout.arguments(learning_rate=1e-3, optim_config=options)
        assert args.optim_config == {**options, "lr": 1e-3}
    assert layout.plugin("muon")(Net(), args.optim_config) == "theirs"
    assert [line.count("write hf_muon in place of muon") for line in caplog.messages] == [1]
    assert "already registered" not in capsys.readouterr().out
    assert not names.is_muon("muon", names.V1)
    assert names.is_muon("hf_muon", names.V1)
    assert names.is_muon("muon"), "in the other program"


@pytest.mark.parametrize("name", ["OptimizerPlugin", "_registry", NEW])
def test_a_muon_of_llamafactory_s_own_runs_also_where_its_registry_has_another_name(name, monkeypatch):
    plain = imported(monkeypatch, renamed(V1["newer"], name), hooks=False).another()
    assert imported(monkeypatch, renamed(V1["newer"], name)).another() == plain == ("str", "loaded")


def test_the_rate_in_0_9_5_is_the_run_s_unless_optim_config_has_one(monkeypatch):
    arguments = imported_layout(monkeypatch, "0.9.5").arguments
    assert arguments(learning_rate=2e-5, optim_config={"name": "muon"}).optim_config["lr"] == 2e-5
    assert arguments(learning_rate=2e-5, optim_config={"name": "muon", "lr": 3e-5}).optim_config["lr"] == 3e-5


@pytest.mark.parametrize("program", V1)
def test_a_resumed_run_without_moments_is_named(program, monkeypatch, caplog):
    """v1 goes on without a word where the checkpoint has no optimizer state."""
    trainer = imported(monkeypatch, V1[program])
    trainer.others()
    assert not caplog.messages
    trainer.muon()
    assert sum("LLaMA-Factory has loaded no optimizer state" in line for line in caplog.messages) == 1


def test_layouts_that_are_not_refused():
    for args in (
        {"dist_config": None, "cp_size": 1},
        {"dist_config": {"name": "fsdp2", "cp_mode": "ulysses", "cp_size": 2}},
        {"dist_config": {"name": "fsdp2"}, "cp_size": 2, "cp_mode": "ulysses"},
        {"dist_config": None},
        {"dist_config": {"name": "fsdp2", "offload_params": True}},
    ):
        refuse_unsupported(SimpleNamespace(**args))


# --- names that v1 may change, each by itself, also those of modules

NEEDED = {
    "LLaMA-Factory v1's arguments": ("TrainingArguments", "learning_rate", "dist_config", "optim_config", ARGUMENTS),
    "LLaMA-Factory v1's optimizers": ("OptimizerPlugin", "_registry", "register", OLD),
    "newer v1's optimizers": ("OptimizerPlugin", "_registry", "register", NEW),
}
"""Names by hook, without which Muon is refused."""
OTHERS = {
    "LLaMA-Factory v1's shards": ("load_checkpoint", "ckpt_dir", SHARDS),
    "LLaMA-Factory v1's resuming": ("TrainingCheckpointCoordinator", "resume", CHECKPOINTS),
}
LAYOUT_OF = {"LLaMA-Factory v1's optimizers": ["0.9.5"], "newer v1's optimizers": ["newer"]}
ROWS = [
    (layout, hook, name)
    for hook, renamed_names in {**NEEDED, **OTHERS}.items()
    for layout in LAYOUT_OF.get(hook, V1)
    for name in renamed_names
]


def renamed(program, name):
    """Return the modules of a program in which a module, or something in them, has another name."""
    if name not in program:
        return {
            module: source and re.sub(rf"\b{name}\b", f"renamed{name}", source) for module, source in program.items()
        }
    moved = f"{name.rpartition('.')[0]}.moved"
    sources = {module: source and source.replace(name, moved) for module, source in program.items()}
    return {name: None, **{moved if module == name else module: source for module, source in sources.items()}}


@pytest.mark.parametrize(("layout_name", "hook", "name"), ROWS)
def test_a_renamed_name(layout_name, hook, name, monkeypatch, caplog):
    program = V1[layout_name]
    ours = imported(monkeypatch, program)
    assert status()[hook] == "patched"
    with_hooks = ours.muon()
    plain = imported(monkeypatch, renamed(program, name), hooks=False).others()
    caplog.clear()
    module = imported(monkeypatch, renamed(program, name))
    assert status()[hook].startswith("waiting" if name in program else "failed")
    assert module.others() == plain
    assert not caplog.messages
    if hook in NEEDED:
        own = ".*" if name in program else hook  # where a module went, nobody knows
        with pytest.raises(RuntimeError, match=f"hook [\"']{own}[\"'] into .* is not in place"):
            module.muon()
    else:
        assert module.muon() == with_hooks


def test_every_hook_has_rows():
    assert {name for name in HOOKS if "v1" in name} == {*NEEDED, *OTHERS}


# --- names of the optimizer, and flags of other packages


def test_both_names_are_ours_also_as_members_of_an_enum_whoever_owns_it():
    class Optimizers(str, Enum):
        MUON = "muon"
        ADAMW = "adamw"

    assert all(names.is_muon(optim) for optim in ("muon", "hf_muon", Optimizers.MUON))
    assert not any(names.is_muon(optim) for optim in (Optimizers.ADAMW, "adamw", "HF_MUON", None, 3, ["muon"]))


def test_flags_mean_what_the_other_package_reads(monkeypatch):
    texts = {"accelerate": {"true", " YES ", "1"}, "llamafactory": {"true", "y", "1"}}
    for package, are_true in texts.items():
        for text in ("true", " YES ", "1", "y", "", "0", "false"):
            monkeypatch.setenv("SOME_FLAG", text)
            assert names.is_set(package, "SOME_FLAG") is (text in are_true), (package, text)
        monkeypatch.delenv("SOME_FLAG")
        assert not names.is_set(package, "SOME_FLAG")
