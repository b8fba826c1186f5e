from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from transformers import TrainingArguments
from typer.testing import CliRunner

import hf_muon
from hf_muon._autoload import HOOKS
from hf_muon.cli import doctor as cli_doctor
from hf_muon.cli.app import app


def doctor(*arguments, **environment):
    program = Path(sys.executable).with_name("hf-muon")
    env = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run([program, "doctor", *arguments], capture_output=True, text=True, check=False, env=env)


@functools.cache
def plain_doctor():
    """Run `hf-muon doctor` without arguments, once for the three tests that read its output."""
    return doctor()


def test_doctor():
    process = plain_doctor()
    assert process.returncode == 0, process.stderr
    assert "optim: muon is accepted without any import" in process.stdout
    assert "found: hf_muon_autoload:activate" in process.stdout
    for hook in ("optim: muon", "optimizer of Trainer", "callback of Trainer", "Accelerator.prepare", "whole states"):
        assert re.search(rf"{re.escape(hook)} +│ patched", process.stdout), hook


def test_doctor_shows_whole_names_in_80_columns(monkeypatch, capsys):
    hooks = dict.fromkeys(HOOKS, "waiting for its import, which takes a while")
    shown = cli_doctor._examine() | {"hooks": hooks}
    monkeypatch.setattr(cli_doctor, "console", lambda: Console(width=80, soft_wrap=True))
    cli_doctor._show(shown)
    lines = capsys.readouterr().out.splitlines()
    assert all(any(f"│ {name} " in line for line in lines) for name in hooks)
    table = [line for line in lines if line.startswith(tuple(f"│ {name}" for name in hooks))]
    assert max(map(len, table)) <= 80


def test_doctor_for_machines_and_for_bug_reports():
    report = json.loads(doctor("--json").stdout)
    assert report["accepted"] is True
    torch = importlib.metadata.version("torch")
    assert report["versions"]["torch"] == torch
    assert report["hooks"]["optim: muon"] == "patched"
    assert report["lost"] == {}
    sentence = plain_doctor().stdout.splitlines()[-1]
    assert sentence.startswith("optim: muon is accepted with python 3.")
    assert f"torch {torch}" in sentence


def test_doctor_lists_the_hooks_of_llamafactory_v1():
    """Expect the registry in one of two modules, depending on the version of LLaMA-Factory."""
    shown = dict(re.findall(r"((?:LLaMA-Factory|newer) ?v1's \w+) +│ ([^│]*?) *│", plain_doctor().stdout))
    registries = [shown.pop(name) for name in ("LLaMA-Factory v1's optimizers", "newer v1's optimizers")]
    assert len(shown) == 3
    if importlib.util.find_spec("llamafactory") is None:
        assert {*shown.values(), *registries} == {"waiting for its import (not installed)"}
    else:
        assert set(shown.values()) == {"waiting for its import"}
        assert set(registries) == {"waiting for its import", "waiting for its import (not in this llamafactory)"}


def test_doctor_says_why_not():
    process = doctor(HF_MUON_AUTOLOAD="0")
    assert process.returncode == 1
    assert "switched off by HF_MUON_AUTOLOAD" in process.stdout
    assert "NOT accepted: no hook is placed. Say `import hf_muon` in the script" in process.stdout


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"transformers/__init__.py": "raise ImportError('half an installation.')"},
            "transformers cannot be imported here (ImportError: half an installation). Repair that first; "
            "`import hf_muon` does not help",
        ),
        (
            {"torch/__init__.py": "raise OSError('libcudart.so: none')"},
            "torch cannot be imported here (OSError: libcudart",
        ),
        (
            {
                "transformers/__init__.py": "",
                "transformers/training_args.py": "import enum\nclass OptimizerNames(enum.Enum): ADAMW = 1",
            },
            "has no registry of optimizers (ModuleNotFoundError: No module named 'transformers.trainer_optimizer'). "
            "Install 5.5.4 or newer; `import hf_muon` does not help",
        ),
    ],
)
def test_doctor_in_a_broken_environment(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = doctor(PYTHONPATH=paths)
    assert process.returncode == 1
    assert f"optim: muon is NOT accepted: {message}" in re.sub(r"transformers \d\S* has", "has", process.stdout)
    assert "without `import hf_muon`" not in process.stdout
    assert "Traceback" not in process.stderr


@pytest.mark.extended(but="accelerate")
@pytest.mark.parametrize("package", ["accelerate", "transformers"])
def test_doctor_says_what_training_arguments_say_of_old_versions(tmp_path, monkeypatch, package):
    folder = tmp_path / f"{package}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = doctor("--json", PYTHONPATH=paths)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match=f"Muon needs {package} .* or newer, and 1.0 is installed") as refusal:
        TrainingArguments(str(tmp_path), optim="muon", use_cpu=True, report_to="none")
    report = json.loads(process.stdout)
    assert (process.returncode, report["accepted"], report["reason"]) == (1, False, str(refusal.value))


def test_help_and_version():
    program = Path(sys.executable).with_name("hf-muon")

    def ask(*words):
        return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout

    assert "doctor" in ask("--help")
    assert ask("--version") == f"hf-muon {hf_muon.__version__}\n"


@pytest.mark.parametrize("command", [[], ["doctor"], ["inspect"], ["plan"], ["report"], ["convert"]])
def test_short_help(command):
    long, short = (CliRunner().invoke(app, [*command, option]) for option in ("--help", "-h"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
