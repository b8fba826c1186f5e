"""`hf-muon` as a whole, and `hf-muon doctor`, which examines a new process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers.trainer_optimizer
from transformers import TrainingArguments

import hf_muon
from hf_muon.cli import doctor as doctor_module
from hf_muon.cli import trial
from hf_muon.cli.console import status
from hf_muon.integrations.names import TAKEN, TRANSFORMERS
from tests.cli.calls import call

UNSET = dict.fromkeys(
    ("HF_MUON_AUTOLOAD", "HF_MUON_DIAGNOSTICS_EVERY", "HF_MUON_STEP_REPORT", "LLAMAFACTORY_MUON_DIAG")
)


def doctor(*arguments, **environment):
    return call("doctor", *arguments, **{**UNSET, **environment})


def in_this_process(monkeypatch):
    """Let `doctor` examine this process, which a test has changed: a new one takes 6 seconds."""
    monkeypatch.setattr(doctor_module, "_seen_by_scripts", trial.examine)


def rows_of(result):
    """Return the columns of what `doctor` prints, up to the empty line."""
    table = result.stdout.partition("\n\n")[0]
    return dict(re.split("  +", line, maxsplit=1) for line in table.splitlines())


@pytest.mark.promise("doctor")
def test_doctor(golden, monkeypatch):
    """Show versions, variables and hooks as a list; which packages are installed depends on the environment."""
    seen = doctor_module._seen_by_scripts()
    monkeypatch.setattr(doctor_module, "_seen_by_scripts", lambda: seen)
    result = doctor("--all")
    rows = rows_of(result)
    *_, last = result.stdout.splitlines()
    packages = ("python", "hf_muon", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "llamafactory")
    for name in packages[1:]:
        found = rows[name] != "-"
        assert found == bool(importlib.util.find_spec(name)), name
        assert not found or rows[name].partition(" ")[0] == importlib.metadata.version(name), name
    lines = [f"{name}: {'...' if name in packages else value}" for name, value in rows.items()]
    golden("cli/doctor", "\n".join([*lines, last, f"exit status {result.exit_code}"]))
    report = json.loads(doctor("--json").stdout)
    assert (report["accepted"], report["lost"], report["hooks"]["optim: muon"]) == (True, {}, "patched")
    assert report["versions"]["torch"] == rows["torch"].partition(" ")[0]


def test_doctor_says_why_not(monkeypatch):
    """Take the handlers of Trainer away, as in a process whose hooks HF_MUON_AUTOLOAD switches off."""
    in_this_process(monkeypatch)
    monkeypatch.setattr(transformers.trainer_optimizer, "_OPTIMIZER_HANDLERS", {})
    result = doctor(HF_MUON_AUTOLOAD="0")
    assert result.exit_code == 1
    assert "switched off by HF_MUON_AUTOLOAD" in result.stdout
    assert "NOT accepted: no hook is placed. Say `import hf_muon` in the script" in result.stdout
    # Without --all, what is not set and hooks are left out.
    assert "torch" in rows_of(result)
    assert not {"HF_MUON_STEP_REPORT", "optim: muon"} & rows_of(result).keys()


def test_doctor_says_where_muon_is_another_optimizer(monkeypatch):
    in_this_process(monkeypatch)
    monkeypatch.setitem(TAKEN, TRANSFORMERS, True)
    monkeypatch.delitem(transformers.trainer_optimizer._OPTIMIZER_HANDLERS, "muon")
    result = doctor()
    assert result.exit_code == 0
    assert "optim: hf_muon is accepted" in result.stdout
    assert "In transformers, muon is an optimizer of its own. Write hf_muon there." in result.stdout


@pytest.mark.parametrize("broken", ["torch", "transformers", "transformers.trainer_optimizer"])
def test_doctor_in_a_broken_environment(broken, monkeypatch, tmp_path):
    """Break torch in a new process, which must not import hf_muon then, and transformers in this one."""
    path, reason = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])], "ModuleNotFoundError: import of "
    if broken == "torch":
        (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: none')")
        reason = "OSError: libcudart"
    else:
        in_this_process(monkeypatch)
        monkeypatch.setitem(sys.modules, broken, None)
    result = doctor(PYTHONPATH=os.pathsep.join(path))
    assert result.exit_code == 1
    assert f"optim: muon is NOT accepted: {broken} cannot be imported here ({reason}" in result.stdout
    assert "Repair that first; `import hf_muon` does not help" in result.stdout


def test_doctor_says_what_training_arguments_say_of_old_versions(tmp_path, monkeypatch):
    folder = tmp_path / "accelerate-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"accelerate .* or newer, and 1.0 is installed") as refusal:
        TrainingArguments(str(tmp_path), optim="muon", use_cpu=True, report_to="none")
    in_this_process(monkeypatch)
    result = doctor("--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["accepted"], report["reason"]) == (1, False, str(refusal.value))


@pytest.mark.extended
def test_doctor_runs_nothing_of_the_folder_and_names_what_scripts_there_would_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("json.py", "transformers.py"):
        (tmp_path / name).write_text("open('ran', 'w')\nraise ImportError('of the folder')\n")
    (tmp_path / "hf_muon").mkdir()
    result = doctor()
    assert not (tmp_path / "ran").exists()
    assert result.exit_code == 1
    assert (
        f"NOT accepted: scripts in this folder find {tmp_path / 'transformers.py'} before the installed"
        in result.stdout
    )
    assert "hf_muon before" not in result.stdout  # a folder that comes after the package
    (tmp_path / "transformers.py").unlink()
    (tmp_path / "peft.py").touch()
    in_this_process(monkeypatch)
    assert f"NOT accepted: scripts in this folder find {tmp_path / 'peft.py'}" in doctor().stdout
    (tmp_path / "peft.py").unlink()
    (tmp_path / "trl.py").touch()
    (tmp_path / "random.py").touch()
    assert f"scripts in this folder find {tmp_path / 'random.py'} before the installed random" in doctor().stdout
    if importlib.util.find_spec("trl"):
        assert f"scripts in this folder find {tmp_path / 'trl.py'} before the installed trl" in doctor().stdout
    # As the finder of an editable installation does, find the folder first.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "hf_muon").is_dir()])
    result = doctor()
    assert result.exit_code == 0
    assert f"find {tmp_path / 'hf_muon'} before the installed hf_muon: rename it" in result.stdout


def test_doctor_in_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "of_another_user").mkdir()
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    is_file = Path.is_file

    def refused(path, *args, **kwargs):  # as for users other than root
        if path.parent.name == "of_another_user":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "is_file", refused)
    assert doctor().exit_code == 0
    (tmp_path / "of_another_user").rmdir()
    tmp_path.rmdir()
    assert doctor().exit_code == 0


def test_doctor_marks_versions_that_were_not_tested(monkeypatch):
    version = importlib.metadata.version
    others = {"transformers": "99.0", "deepspeed": "0.1", "trl": "0.1", "llamafactory": "0.9.4"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: others.get(name) or version(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    in_this_process(monkeypatch)
    result = doctor()
    assert result.exit_code == 0, "none of them stops a run of Trainer"
    for words in (
        "99.0 (newer than tested: 5.24)",
        "0.1 (too old: 0.18.4 or newer)",
        "0.9.4 (too old: 0.9.5 or newer)",
    ):
        assert words in result.stdout


def test_doctor_names_a_program_that_cannot_be_imported(tmp_path, monkeypatch):
    """As LLaMA-Factory is where torchaudio is missing."""
    (tmp_path / "llamafactory").mkdir()
    (tmp_path / "llamafactory" / "__init__.py").write_text("import torchaudio_of_another_build\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "llamafactory"]:
        monkeypatch.delitem(sys.modules, name)
    in_this_process(monkeypatch)
    result = doctor()
    assert result.exit_code == 0
    assert (
        "llamafactory cannot be imported here (ModuleNotFoundError: No module named 'torchaudio_of_another_build')."
        in result.stdout
    )


def test_as_a_program():
    program = Path(sys.executable).with_name("hf-muon")
    process = subprocess.run([program, "report", "nowhere"], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (1, "")
    assert "nowhere" in process.stderr
    assert "Traceback" not in process.stderr


COMMANDS = [[], ["doctor"], ["inspect"], ["plan"], ["report"]]


def test_help_and_version():
    assert "doctor" in call("--help").stdout
    assert call("--version").stdout == f"hf-muon {hf_muon.__version__}\n"
    assert (call().exit_code, call("swep").exit_code) == (2, 2)
    for command in COMMANDS:
        long, short = (call(*command, option) for option in ("--help", "-h"))
        assert (short.exit_code, short.stdout) == (0, long.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_not_wider_than_the_terminal(command):
    shown = call(*command, "-h", COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80


def test_help_imports_no_torch():
    code = "import sys; from hf_muon.cli import build_parser; build_parser().format_help(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers"} & set(modules)


READERLESS = """
import types
from hf_muon import cli
arguments = types.SimpleNamespace(run=lambda _: print("a table"))
cli.build_parser = lambda: types.SimpleNamespace(parse_args=lambda *_: arguments)
raise SystemExit(cli.main())
"""


def test_a_reader_that_is_gone():
    """Print into a pipe that nobody reads any more, as in `hf-muon ... | head`."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-c", READERLESS]
    process = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (process.returncode, process.stderr) == (1, "")


def test_a_long_wait_shows_a_line_on_a_terminal_which_is_erased(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with status("importing"):
        assert stream.getvalue() == ""
    stream.isatty = lambda: True
    with status("importing" * 100):
        assert stream.getvalue().startswith("importing")
        assert len(stream.getvalue()) < 80
    assert stream.getvalue().endswith("\r\033[K")
