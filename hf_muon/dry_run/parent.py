"""Start a command as a dry run, and read its report."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_muon.dry_run.report import BEGUN, PREFIX, REPORT, VARIABLE, WEIGHTS

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
    variables = [*itertools.takewhile(re.compile(r"[A-Za-z_]\w*=").match, command)]
    words = command[len(variables) :]
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    environment = {
        **os.environ,
        **dict(text.split("=", 1) for text in variables),
        VARIABLE: folder.name.removeprefix(PREFIX),
    }
    environment |= {WEIGHTS: "1"} if with_weights else {}
    try:
        _ask(_interpreter_of(words), folder, environment)
        with (folder / "output").open("wb") as screen:
            nobody = subprocess.DEVNULL
            done = subprocess.run(words, env=environment, stdin=nobody, stdout=screen, stderr=screen, check=False)
        report = json.loads((folder / REPORT).read_text(encoding="utf-8")) if (folder / REPORT).exists() else {}
        if not report or "failed" in report:
            has_begun = any(folder.glob(f"{BEGUN}*"))
            raise ValueError(_failure(report, done.returncode, has_begun, _kept(folder / "output")))
        return report
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _interpreter_of(words: Sequence[str]) -> list[str]:
    """Return the Python that runs a command, with its options.

    Raises:
        ValueError: the command is not there, or it cannot be told which Python runs.
    """
    name = words[0] if words else ""
    path = shutil.which(name)
    if path is None:
        raise ValueError(f"{name or 'after --'}: there is no such command [no-such-command]")
    if re.fullmatch(_PYTHON, Path(path).name):
        return [path, *itertools.takewhile(re.compile(r"-[bBdEiIOPqsSuvx]+$").match, words[1:])]
    with open(path, "rb") as file:
        found = _FIRST.search(file.read(4096).decode("utf-8", "replace"))
    python = found and shutil.which(found["path"] or found["long"])
    if not python:
        raise ValueError(
            f"{name} is no Python program, so it cannot be asked whether hf_muon is loaded in the Python that trains, "
            "and without it the command would train. Give the command that it runs (python, torchrun, "
            "llamafactory-cli, ...), or write HF_MUON_DRY_RUN=1 in front of that [no-python-command]"
        )
    return [python]


def _ask(interpreter: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
    """Ask a Python whether hf_muon begins a dry run in it.

    Raises:
        ValueError: it does not: the command would train.
    """
    asked = [*interpreter, "-c", "import torch"]
    answer = subprocess.run(
        asked, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    marks = [*folder.glob(f"{BEGUN}*")]
    for mark in marks:
        mark.unlink()
    if not marks:
        reason = (answer.stderr.strip().splitlines() or ["it is not loaded by import torch"])[-1]
        raise ValueError(
            f"hf_muon is not loaded in {' '.join(interpreter)}, where the command would train: {reason}. Install it "
            "there, and see hf-muon doctor [dry-run-not-installed]"
        )


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
        return (
            f"the command has ended with {code}, and hf_muon was loaded in none of its processes: if it trains, it has "
            f"trained. Its output: {output} [dry-run-not-begun]"
        )
    if not report:
        return (
            f"the command has ended with {code}, and has made no optimizer. Does it train (do_train: true)? Its "
            f"output: {output} [no-optimizer-made]"
        )
    return (
        f"{above}the command has ended with {code} before it made an optimizer: {report['failed']}\nIts output: "
        f"{output} [dry-run-failed]"
    )
