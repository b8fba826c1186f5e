from __future__ import annotations

import functools
import importlib
import importlib.metadata
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
def whole_doctor():
    """Run `hf-muon doctor --all`, once for the two tests that read its output."""
    return doctor("--all")


def test_doctor():
    process = whole_doctor()
    assert process.returncode == 0, process.stderr
    assert "optim: muon is accepted without any import" in process.stdout
    assert "found: hf_muon_autoload:activate" in process.stdout
    for hook in ("optim: muon", "optimizer of Trainer", "callback of Trainer", "Accelerator.prepare", "whole states"):
        assert re.search(rf"{re.escape(hook)} +│ patched", process.stdout), hook


def test_doctor_shows_hooks_and_what_is_not_there_only_if_asked(monkeypatch, capsys):
    findings = {**cli_doctor._examine(), "hooks": dict.fromkeys(HOOKS, "waiting for its import, which takes a while")}
    findings["versions"]["deepspeed"] = None
    monkeypatch.setattr(cli_doctor, "console", lambda: Console(width=80, soft_wrap=True))
    cli_doctor._show(findings, everything=True)
    lines = capsys.readouterr().out.splitlines()
    for name in (*findings["versions"], *findings["variables"], *HOOKS):
        (line,) = (line for line in lines if f"│ {name} " in line)
        assert len(line) <= 80
    cli_doctor._show(findings, everything=False)
    text = capsys.readouterr().out
    assert "│ torch " in text
    assert not any(f"│ {name} " in text for name in ("deepspeed", "HF_MUON_STEP_REPORT", *HOOKS))


def test_doctor_for_bug_reports():
    report = json.loads(doctor("--json").stdout)
    assert report["accepted"] is True
    torch = importlib.metadata.version("torch")
    assert report["versions"]["torch"] == torch
    assert report["hooks"]["optim: muon"] == "patched"
    assert report["lost"] == {}


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
            {"transformers/__init__.py": ""},
            "transformers.trainer_optimizer cannot be imported here (ModuleNotFoundError: No module named "
            "'transformers.trainer_optimizer'). Repair that first; `import hf_muon` does not help",
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
    assert f"optim: muon is NOT accepted: {message}" in process.stdout
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


@pytest.mark.parametrize("package", ["typer", "rich", "plotly"])
def test_a_package_of_the_extra_that_is_missing(package, monkeypatch):
    """Hide a package that the command imports when it starts, or when it draws a page."""
    for module in [
        name for name in sys.modules if f"{name}.".startswith(("hf_muon.cli.", "hf_muon.diagnostics.", f"{package}."))
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["hf-muon", "report", "."])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module("hf_muon.cli").main()
    assert exit.value.code == (
        f"hf-muon needs {package}, which is not installed here. Run: pip install 'hf_muon[cli]' [package-missing]"
    )


@pytest.mark.parametrize("command", [[], ["doctor"], ["inspect"], ["plan"], ["report"], ["convert"]])
def test_short_help(command):
    long, short = (CliRunner().invoke(app, [*command, option]) for option in ("--help", "-h"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
