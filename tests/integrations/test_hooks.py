"""Names of other packages that the hooks touch: few are replaced, and any of them may be renamed.

Where one is renamed, runs with AdamW do not notice, and those with Muon go on or are refused. The names are replaced in
the source while Python imports it, in every module that uses them, so that the package itself works as before. Each
case is a process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from hf_muon import _autoload
from hf_muon._autoload import HOOKS
from hf_muon.integrations.names import is_muon, is_set
from tests import hooks
from tests.e2e.harness import ROOT, Server
from tests.hooks import imported
from tests.integrations import renaming
from tests.integrations.llamafactory_v1_stand_ins import ARGUMENTS as V1_ARGUMENTS
from tests.integrations.llamafactory_v1_stand_ins import NEW, OLD
from tests.integrations.program_stand_ins import PROGRAMS

SITE = Path(__file__).parent / "renamed_site"
MOST = 11
"""Attributes that may be replaced. The rest of the 30 of the design is DeepSpeed's, and the attention of qk_clip."""
TRAINER, ACCELERATOR = "transformers.trainer", "accelerate.accelerator"
FSDP, DCP = "accelerate.utils.fsdp_utils", "torch.distributed.checkpoint.state_dict"
OPTIMIZERS = "transformers.trainer_optimizer"


class Row(NamedTuple):
    """A name that a hook touches, the modules that have it, and whether a plain run of Muon is refused without it."""

    hook: str
    name: str
    modules: tuple[str, ...]
    is_needed: bool = False


# The names of a case are renamed together: each is of another hook.
CASES = {
    "handlers": [Row("optimizer of Trainer", "_OPTIMIZER_HANDLERS", (OPTIMIZERS, TRAINER), is_needed=True)],
    "callbacks": [Row("callback of Trainer", "DEFAULT_CALLBACKS", (TRAINER,), is_needed=True)],
    "first": [
        Row("Ulysses", "compute_loss", (TRAINER,)),
        Row("batches of Ulysses", "deepspeed_ulysses_dl_adapter", (TRAINER, ACCELERATOR)),
        Row("accelerate's shards", "fsdp_plugin", (FSDP,)),
        Row("whole states", "info", (DCP,)),
    ],
    "second": [
        Row("Ulysses", "skip_first_batches", (TRAINER, "accelerate", "accelerate.data_loader", ACCELERATOR)),
        Row("accelerate's shards", "input_dir", (FSDP,)),
        Row("whole states", "_load_optim_state_dict", (DCP,)),
    ],
    "third": [Row("whole states", "fqn_param_mapping", (DCP,))],
}
server = Server("torch", "datasets", HF_MUON_AUTOLOAD="0")


@functools.cache
def run(*rows, hooks=True):
    """Train three steps with AdamW and with Muon where these names are other ones; return what came of it."""
    renames = {}
    for row in rows:
        for module in row.modules:
            renames.setdefault(module, {})[row.name] = f"renamed{row.name}"
    path = os.pathsep.join([str(SITE), str(ROOT)])
    words = [renaming.__file__, *(["hooks"] if hooks else [])]
    printed = server.run(words, cwd=ROOT, RENAMES=json.dumps(renames), PYTHONPATH=path)
    return json.loads(printed.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.first_tier("handlers|first")
@pytest.mark.parametrize("case", CASES)
def test_a_renamed_name(case):
    plain, ours = run(hooks=False), run()
    rows = [row for row in CASES[case] if row.hook != "batches of Ulysses" or ours["has sequence parallel"]]
    seen = run(*rows)
    for name in ("adamw", "adamw whole state", "adamw shards"):
        assert seen[name] == ours[name] == plain[name], f"{name} notices {rows}"
    assert seen["heard of adamw"] == []
    for row in rows:
        assert ours["states"][row.hook] == "patched"
        assert seen["states"][row.hook].startswith("failed"), row
        assert row.hook in str(seen["muon"]) if row.is_needed else seen["muon"] == ours["muon"]


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


def test_every_hook_has_a_row_and_says_why_it_is_there():
    assert all(len(words.split()) > 3 for hook in HOOKS.values() for words in (hook.lost, hook.seam))
    rows = {row.hook for rows in (*CASES.values(), PROGRAM_ROWS) for row in rows}
    assert _autoload.HOOKS.keys() - rows == {
        *("optim: muon", "Accelerator.prepare", "timm"),  # public
        "LLaMA-Factory's parser",
    }


# --- how many attributes of other packages the hooks replace


def replaced(name):
    """Return the attributes that a hook sets, each with its owner; entries of registries and lists are additions.

    A function that other modules have imported, as here all have, counts once.
    """
    path, _, function = HOOKS[name].patch.partition(":")
    module = importlib.import_module(HOOKS[name].module)
    changes = getattr(importlib.import_module(path), function)(module)
    owners = [(owner, attribute) for owner, attribute, _ in changes if not isinstance(owner, (dict, list))]
    return {(owner.__name__, name) for owner, name in owners if owner is module or not isinstance(owner, ModuleType)}


def test_few_attributes_are_replaced(monkeypatch):
    found = {name: replaced(name) for name in HOOKS if HOOKS[name].module.split(".")[0] not in ("timm", "llamafactory")}
    for program in PROGRAMS.values():
        with monkeypatch.context() as patch:
            hooks.imported(patch, program, hooks=False)
            found |= {name: replaced(name) for name in HOOKS if program.get(HOOKS[name].module)}
    parser = ModuleType(HOOKS["LLaMA-Factory's parser"].module)
    parser.get_train_args = tuple
    monkeypatch.setitem(sys.modules, parser.__name__, parser)
    found["LLaMA-Factory's parser"] = replaced("LLaMA-Factory's parser")
    assert found.keys() == HOOKS.keys()
    attributes = set().union(*found.values())
    assert 5 < len(attributes) <= MOST, sorted(attributes)


# --- names of the optimizer, and flags of other packages


def test_both_names_are_ours_also_as_members_of_an_enum_whoever_owns_it():
    class Optimizers(str, Enum):
        MUON = "muon"
        ADAMW = "adamw"

    assert all(is_muon(optim) for optim in ("muon", "hf_muon", Optimizers.MUON))
    assert not any(is_muon(optim) for optim in (Optimizers.ADAMW, "adamw", "HF_MUON", None, 3, ["muon"]))


@pytest.mark.parametrize(
    ("package", "text", "expected"),
    [
        ("accelerate", "true", True),
        ("accelerate", " YES ", True),
        ("accelerate", "y", False),
        ("accelerate", "", False),
        ("llamafactory", "y", True),
        ("llamafactory", "1", True),
        ("llamafactory", "yes", False),
    ],
)
def test_flags_mean_what_the_other_package_reads(package, text, expected, monkeypatch):
    monkeypatch.setenv("SOME_FLAG", text)
    assert is_set(package, "SOME_FLAG") is expected
    monkeypatch.delenv("SOME_FLAG")
    assert not is_set(package, "SOME_FLAG")
