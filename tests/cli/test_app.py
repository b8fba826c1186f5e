"""`hf-muon` as a whole, and `hf-muon doctor`, which examines a new process."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments

import hf_muon
from tests.cli.calls import call

UNSET = dict.fromkeys(("HF_MUON_AUTOLOAD", "HF_MUON_DIAGNOSTICS_EVERY", "HF_MUON_STEP_REPORT"))


def doctor(*arguments, **environment):
    return call("doctor", *arguments, **{**UNSET, "LLAMAFACTORY_MUON_DIAG": None, **environment})


def searched_first(folder):
    """Return the environment in which modules of a folder are found before those that are installed."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.promise("doctor")
def test_doctor(golden):
    """Show versions, variables and hooks as a list; which packages are installed depends on the environment."""
    result = doctor("--all")
    rows = dict(re.findall(r"^│ (.*?) +│ (.*?) +│$", result.stdout, re.MULTILINE))
    *_, last = result.stdout.splitlines()
    packages = ("python", "hf_muon", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "llamafactory")
    for name in packages[1:]:
        found = rows[name] != "-"
        assert found == bool(importlib.util.find_spec(name)), name
        assert not found or rows[name] == importlib.metadata.version(name), name
    lines = [f"{name}: {'...' if name in packages else value}" for name, value in rows.items()]
    golden("cli/doctor", "\n".join([*lines, last, f"exit status {result.exit_code}"]))


def test_doctor_for_bug_reports():
    report = json.loads(doctor("--json").stdout)
    assert (report["accepted"], report["lost"], report["hooks"]["optim: muon"]) == (True, {}, "patched")
    assert report["versions"]["torch"] == importlib.metadata.version("torch")


def test_doctor_says_why_not():
    result = doctor(HF_MUON_AUTOLOAD="0")
    assert result.exit_code == 1
    assert "switched off by HF_MUON_AUTOLOAD" in result.stdout
    assert "NOT accepted: no hook is placed. Say `import hf_muon` in the script" in result.stdout
    # Without --all, what is not set and hooks are left out.
    assert "│ torch " in result.stdout
    assert not any(f"│ {name} " in result.stdout for name in ("HF_MUON_STEP_REPORT", "optim: muon"))


@pytest.mark.first_tier("ImportError|OSError")
@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("transformers/__init__.py", "raise ImportError('half.')", "transformers cannot be imported here (ImportError"),
        ("torch/__init__.py", "raise OSError('libcudart.so: none')", "torch cannot be imported here (OSError: libcuda"),
        ("transformers/__init__.py", "", "transformers.trainer_optimizer cannot be imported here (ModuleNotFoundErr"),
    ],
)
def test_doctor_in_a_broken_environment(tmp_path, file, text, reason):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    result = doctor(**searched_first(tmp_path))
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert f"optim: muon is NOT accepted: {reason}" in result.stdout
    assert "Repair that first; `import hf_muon` does not help" in result.stdout


def test_doctor_says_what_training_arguments_say_of_old_versions(tmp_path, monkeypatch):
    folder = tmp_path / "accelerate-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.0\n")
    result = doctor("--json", **searched_first(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"accelerate .* or newer, and 1.0 is installed") as refusal:
        TrainingArguments(str(tmp_path), optim="muon", use_cpu=True, report_to="none")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["accepted"], report["reason"]) == (1, False, str(refusal.value))


def test_as_a_program():
    program = Path(sys.executable).with_name("hf-muon")
    process = subprocess.run([program, "report", "nowhere"], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (1, "")
    assert "nowhere" in process.stderr
    assert "Traceback" not in process.stderr


def test_help_and_version():
    assert "doctor" in call("--help").stdout
    assert call("--version").stdout == f"hf-muon {hf_muon.__version__}\n"
    for command in ([], ["doctor"], ["inspect"], ["plan"], ["sweep"], ["report"], ["convert"]):
        long, short = (call(*command, option) for option in ("--help", "-h"))
        assert (short.exit_code, short.stdout) == (0, long.stdout)


@pytest.mark.parametrize("package", ["typer", "rich", "plotly"])
def test_a_package_of_the_extra_that_is_missing(package, monkeypatch):
    """Hide a package that the command imports when it starts, or when it draws a page."""
    own = ("hf_muon.cli.", "hf_muon.diagnostics.", f"{package}.")
    for module in [name for name in sys.modules if f"{name}.".startswith(own)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["hf-muon", "report", "."])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module("hf_muon.cli").main()
    assert (
        f"{package}, which is not installed here. Run: pip install 'hf_muon[cli]' [package-missing]" in exit.value.code
    )
