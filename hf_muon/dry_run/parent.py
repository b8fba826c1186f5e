"""Start a command as a dry run, and read its report."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_muon.dry_run.report import BEGUN, PREFIX, REPORT, VARIABLE, WEIGHTS

_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = r"python[\d.]*|pypy[\d.]*"
# The line with which pip and uv begin a script: `#!`, or for long paths that of a shell, which runs Python.
_FIRST = re.compile(
    rf"\A#!\s*(?:\S*/env\s+)?(?P<path>\S*(?:{_PYTHON}))|^'''exec' \"?(?P<long>[^\"\n]*(?:{_PYTHON}))\"? ", re.M
)


def run(command: Sequence[str], *, with_weights: bool = False) -> dict[str, Any]:
    """Run a command up to its optimizer, and return its report.

    Args:
        command: words of a command, after values of variables, as ``NAME=VALUE``.
        with_weights: load the weights of its models.

    Raises:
        ValueError: the command is not there or no Python program, hf_muon is not loaded in its Python, or it has ended
            before its optimizer was made, for a reason that is not ours.
    """
    variables = [*itertools.takewhile(_VARIABLE.match, command)]
    words = command[len(variables) :]
    environment = {**os.environ, **dict(text.split("=", 1) for text in variables)}
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=environment.get("TMPDIR")))
    environment |= {VARIABLE: folder.name.removeprefix(PREFIX), **({WEIGHTS: "1"} if with_weights else {})}
    try:
        _refuse(words, environment)
        for mark in folder.glob(f"{BEGUN}*"):  # of the Python that was asked
            mark.unlink()
        with (folder / "output").open("wb") as screen:
            nobody = subprocess.DEVNULL
            done = subprocess.run(words, env=environment, stdin=nobody, stdout=screen, stderr=screen, check=False)
        report = json.loads((folder / REPORT).read_text(encoding="utf-8")) if (folder / REPORT).exists() else {}
        if done.returncode and report and not report["refused"]:
            report.setdefault("failed", "a process of it has failed")
        if not report or "failed" in report:
            has_begun = any(folder.glob(f"{BEGUN}*"))
            raise ValueError(_failure(report, done.returncode, has_begun, _kept(folder / "output")))
        return report
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise unless hf_muon begins a dry run in the Python that runs a command.

    Raises:
        ValueError: the command is not there, nothing says which Python runs it, or hf_muon is not loaded there.
    """
    name = words[0] if words else ""
    if not shutil.which(name, path=environment.get("PATH")):
        raise ValueError(f"{name or 'after --'}: there is no such command [no-such-command]")
    interpreter = interpreter_of(words, environment)
    if not interpreter:
        raise ValueError(
            f"{name} is no Python program, so it cannot be asked whether hf_muon is loaded in the Python that trains, "
            "and without it the command would train. Give the command that it runs (python, torchrun, "
            "llamafactory-cli, ...), or write HF_MUON_DRY_RUN=1 in front of that [no-python-command]"
        )
    if reason := missing_in(interpreter, environment):
        raise ValueError(
            f"hf_muon is not loaded in {' '.join(interpreter)}, where the command would train: {reason}. Install it "
            "there, and see hf-muon doctor [dry-run-not-installed]"
        )


def interpreters_of(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield each Python that a command, or a line of a shell, runs, with its environment."""
    own, commands = dict(environment), [words]
    if re.fullmatch(r"(ba|da|z|k)?sh", Path(words[0]).name) and "-c" in words[:-1]:
        # Not parsed as a shell does: a word that only looks like a command is asked in vain.
        line = words[words.index("-c") + 1].replace('"', " ").replace("'", " ").split()
        commands = [line[index:] for index in range(len(line))]
    for command in commands:
        if match := _VARIABLE.match(command[0]):
            own[match[1]] = match[2]
        elif interpreter := interpreter_of(command, own):
            yield interpreter, own


def interpreter_of(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the Python that runs a command, with its options; none if it is not a program of Python."""
    path = shutil.which(words[0], path=environment.get("PATH"))
    if path is None:
        return []
    if re.fullmatch(_PYTHON, Path(path).name):
        return [path, *itertools.takewhile(re.compile(r"-[bBdEiIOPqsSuvx]+$").match, words[1:])]
    try:
        with open(path, "rb") as file:
            found = _FIRST.search(file.read(4096).decode("utf-8", "replace"))
    except OSError:  # it may be run, but not read
        return []
    python = found and shutil.which(found["path"] or found["long"], path=environment.get("PATH"))
    return [python] if python else []


def missing_in(interpreter: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return why hf_muon begins no dry run in a Python; empty if it does."""
    code = "import sys, torch; sys.exit('hf_muon.dry_run.hooks' not in sys.modules)"
    answer = subprocess.run(
        [*interpreter, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    reasons = answer.stderr.strip().splitlines() or ["it is not loaded by import torch"]
    return reasons[-1] if answer.returncode else ""


def _kept(output: Path) -> Path:
    """Return a copy of what the command has printed, which stays."""
    handle, name = tempfile.mkstemp(prefix=PREFIX, suffix=".log")
    os.close(handle)
    return Path(shutil.move(output, name))


def _failure(report: dict[str, Any], code: int, has_begun: bool, output: Path) -> str:
    """Return why there are no routes, below the reasons of hf_muon."""
    reasons = "".join(f"\n  - {reason}" for reason in report.get("refused", ()))
    above = f"this run would be refused:{reasons}\n" if reasons else ""
    if not has_begun:
        *_, last = ["", *output.read_text(encoding="utf-8", errors="replace").split("\n")[-2:-1]]
        return (
            f"the command has ended with {code}, and hf_muon was loaded in none of its processes: if it trains, it has "
            f"trained. {last and f'It said last: {last}. '}Its output: {output} [dry-run-not-begun]"
        )
    if not report:
        return (
            f"the command has ended with {code}, and has made no optimizer. Does it train (do_train: true)? Its "
            f"output: {output} [no-optimizer-made]"
        )
    advice = "--weights loads weights, for code that reads them.\n" if "meta tensor" in report["failed"] else ""
    return (
        f"{above}the command has ended with {code} before it made an optimizer: {report['failed']}\n{advice}"
        f"Its output: {output} [dry-run-failed]"
    )
