"""Other packages rename what hooks touch: runs with AdamW do not notice, and those with Muon go on or are refused.

The names are replaced in the source while Python imports it, in every module that uses them, so that the package itself
works as before. Each case is a process.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from hf_muon import _autoload
from hf_muon.integrations.transformers.refusals import refuse_failed_hooks
from tests.hooks import imported
from tests.integrations import renaming
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS as V1_ARGUMENTS
from tests.integrations.llamafactory_v1_stand_ins import NEW, OLD
from tests.integrations.program_stand_ins import PROGRAMS

TRAINER, ACCELERATOR = "transformers.trainer", "accelerate.accelerator"
FSDP, DCP = "accelerate.utils.fsdp_utils", "torch.distributed.checkpoint.state_dict"
OPTIMIZERS, ARGUMENTS = "transformers.trainer_optimizer", "transformers.training_args"


class Row(NamedTuple):
    """A name that a hook touches, the modules that have it, and whether a plain run of Muon is refused without it."""

    hook: str
    name: str
    modules: tuple[str, ...]
    is_needed: bool = False


ROWS = [
    Row("optimizer of Trainer", "_OPTIMIZER_HANDLERS", (OPTIMIZERS, TRAINER), is_needed=True),
    Row("callback of Trainer", "DEFAULT_CALLBACKS", (TRAINER,), is_needed=True),
    Row("Ulysses", "compute_loss", (TRAINER,)),
    Row("Ulysses", "skip_first_batches", (TRAINER, "accelerate", "accelerate.data_loader", ACCELERATOR)),
    Row("batches of Ulysses", "deepspeed_ulysses_dl_adapter", (TRAINER, ACCELERATOR)),
    Row("accelerate's shards", "fsdp_plugin", (FSDP,)),
    Row("accelerate's shards", "input_dir", (FSDP,)),
    Row("whole states", "_load_optim_state_dict", (DCP,)),
    Row("whole states", "info", (DCP,)),
    Row("whole states", "fqn_param_mapping", (DCP,)),
]
NEEDED_BY = {
    "Ulysses": {"sp_size": 2},
    "batches of Ulysses": {"sp_size": 2},
    "whole states": {"fsdp": "full_shard"},
    "callback of Trainer": {},
}
"""What of a run's arguments makes it rest on a hook."""


@functools.cache
def run(*rows, hooks=True):
    """Train three steps with AdamW and with Muon where these names are other ones; return what came of it."""
    renames = {}
    for row in rows:
        for module in row.modules:
            renames.setdefault(module, {})[row.name] = f"renamed{row.name}"
    paths = [str(Path(renaming.__file__).parent / "renamed_site"), os.environ.get("PYTHONPATH", str(Path.cwd()))]
    env = {
        **os.environ,
        "HF_MUON_AUTOLOAD": str(int(hooks)),
        "HF_HUB_OFFLINE": "1",
        "RENAMES": json.dumps(renames),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    process = subprocess.run([sys.executable, renaming.__file__], capture_output=True, text=True, check=False, env=env)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.strip().splitlines()[-1])


def assert_row(row, seen):
    plain, ours = run(hooks=False), run()
    for name in ("adamw", "adamw whole state", "adamw shards"):
        assert seen[name] == plain[name], f"{name} notices that {row.name} has another name"
    assert seen["heard of adamw"] == []
    assert ours["states"][row.hook] == "patched"
    assert seen["states"][row.hook].startswith("failed")
    assert row.hook in str(seen["muon"]) if row.is_needed else seen["muon"] == ours["muon"]


@pytest.mark.slow
@pytest.mark.extended(but="info|_OPTIMIZER_HANDLERS")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.hook}: {row.name}")
def test_a_renamed_name(row):
    if row.hook not in run()["states"] or not all(map(importlib.util.find_spec, row.modules)):
        pytest.skip("not in this version")
    if row.hook == "batches of Ulysses" and not run()["has sequence parallel"]:
        pytest.skip("this accelerate has no sequence parallel")
    assert_row(row, run(row))


@pytest.mark.parametrize("hook", NEEDED_BY)
def test_runs_that_rest_on_a_failed_hook_are_refused_by_its_name(hook, monkeypatch):
    changes = dict(NEEDED_BY[hook])
    fsdp = changes.pop("fsdp", None)
    args = SimpleNamespace(fsdp=fsdp, parallelism_config=SimpleNamespace(**changes))
    refuse_failed_hooks(args)
    monkeypatch.setitem(_autoload._states, hook, "failed: AttributeError: gone")
    with pytest.raises(RuntimeError, match=rf"hook '{hook}' into \S+ is not in place \(failed: AttributeError: gone\)"):
        refuse_failed_hooks(args)
    if changes or fsdp:
        refuse_failed_hooks(SimpleNamespace(fsdp=None, parallelism_config=None))


# --- programs that are not installed everywhere, on stand-ins


class ProgramRow(NamedTuple):
    """What a hook into a program touches, each name or module by itself, and whether Muon is refused without it."""

    program: str
    hook: str
    names: tuple[str, ...]
    is_needed: bool = False


FIELDS = ("TrainingArguments", "learning_rate", "dist_config", "optim_config")
SHARDS = "llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2"
PROGRAM_ROWS = [
    *(
        row
        for program, hook, module in (
            ("LLaMA-Factory v1", "LLaMA-Factory v1's optimizers", OLD),
            ("newer v1", "newer v1's optimizers", NEW),
        )
        for row in (
            ProgramRow(program, hook, ("OptimizerPlugin", "_registry", "register", module), is_needed=True),
            ProgramRow(program, "LLaMA-Factory v1's arguments", (*FIELDS, V1_ARGUMENTS), is_needed=True),
            ProgramRow(program, "LLaMA-Factory v1's shards", ("load_checkpoint", "ckpt_dir", SHARDS)),
        )
    ),
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


@pytest.mark.parametrize(
    ("row", "name"),
    [(row, name) for row in PROGRAM_ROWS for name in row.names],
    ids=lambda own: own if isinstance(own, str) else own.hook,
)
def test_a_renamed_name_of_a_program(row, name, monkeypatch, caplog):
    program = PROGRAMS[row.program]
    ours = imported(monkeypatch, program)
    assert _autoload.status()[row.hook] == "patched"
    with_hooks = ours.muon()
    plain = imported(monkeypatch, renamed(program, name), hooks=False).others()
    caplog.clear()
    module = imported(monkeypatch, renamed(program, name))
    assert _autoload.status()[row.hook].startswith("waiting" if name in program else "failed")
    assert module.others() == plain
    assert not caplog.messages
    if row.is_needed:
        hook = ".*" if name in program else row.hook  # where it went, nobody knows
        with pytest.raises(RuntimeError, match=f"hook [\"']{hook}[\"'] into .* is not in place"):
            module.muon()
    else:
        assert module.muon() == with_hooks


def test_every_hook_has_a_row():
    rows = {row.hook for row in (*ROWS, *PROGRAM_ROWS)}
    assert _autoload.HOOKS.keys() - rows == {
        *("optim: muon", "Accelerator.prepare", "timm"),  # public
        "LLaMA-Factory's parser",
    }
