"""`hf-muon doctor`: whether `optim: muon` is accepted here, and why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hf_muon._autoload import HOOKS
from hf_muon.cli import trial
from hf_muon.cli.console import add_json, print_json, status
from hf_muon.diagnostics.log import EVERY, OF_LLAMAFACTORY, REPORT, is_on
from hf_muon.versions import NEEDED, remark

VARIABLES = ("HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", EVERY, REPORT, OF_LLAMAFACTORY)
PACKAGES = ("hf_muon", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "llamafactory")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = (
        "Show what is installed, and whether `optim: muon` is accepted in scripts of this folder. Exits with 1 if not."
    )
    parser = commands.add_parser("doctor", help="show whether `optim: muon` is accepted here", description=text)
    parser.add_argument(
        "--all", action="store_true", help="also list what is not installed, variables that are not set, and hooks"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings as a list, or as JSON, and return whether Muon is refused."""
    with status("importing torch, transformers and the programs that use them"):
        findings = _examine()
    if arguments.json:
        print_json(findings)
    else:
        _show(findings, everything=arguments.all)
    return int(not findings["accepted"])


def _examine() -> dict[str, Any]:
    """Return all findings that `doctor` shows."""
    seen, hidden = _seen_by_scripts(), _hidden()
    needed = (*NEEDED, "peft")  # Trainer imports peft where it is installed.
    reason = seen["reason"] or next((text for package, text in hidden.items() if package in needed), None)
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "remarks": {name: text for name, version in versions.items() if version and (text := remark(name, version))},
        "entry_point": _entry_point(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "hooks": seen["states"],
        "lost": {name: HOOKS[name].lost for name, state in seen["states"].items() if state.startswith("failed")},
        "problems": {**seen["broken"], **hidden},
        "name": seen["name"],
        "taken": seen["taken"],
        "accepted": reason is None,
        "reason": reason,
    }


def _show(findings: dict[str, Any], *, everything: bool) -> None:
    rows = {
        **findings["versions"],
        "entry point run by import torch": findings["entry_point"],
        **findings["variables"],
        **(findings["hooks"] if everything else {}),
    }
    rows = {name: state for name, state in rows.items() if everything or state is not None}
    width = max(map(len, rows))
    for name, state in rows.items():
        words = findings["remarks"].get(name)
        print(f"{name:{width}}  {'-' if state is None else f'{state} ({words})' if words else state}")

    print()
    for name, lost in findings["lost"].items():
        print(f"{name} has failed: {lost}. Runs of Muon that need it are refused.")
    for text in findings["problems"].values():
        if text != findings["reason"]:
            print(f"{text}.")
    if findings["accepted"]:
        print(f"optim: {findings['name']} is accepted without any import.")
        for program in findings["taken"]:
            print(f"In {program}, muon is an optimizer of its own. Write hf_muon there.")
    else:
        print(f"optim: muon is NOT accepted: {findings['reason']}.")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _entry_point() -> str:
    """Return whether `import torch` loads the entry point in this environment."""
    points = [p for p in importlib.metadata.entry_points(group="torch.backends") if p.name == "hf_muon"]
    if not points:
        return "not found: hf_muon is not installed here (pip install hf_muon); `import hf_muon` works, too"
    torch_loads = os.environ.get(VARIABLES[1], "1") == "1"  # any other text is off for torch
    for variable, acts in zip(VARIABLES, (is_on(VARIABLES[0], unset=True), torch_loads), strict=False):
        if not acts:
            return f"switched off by {variable}; `import hf_muon` in the script works still"
    return f"found: {points[0].value}"


def _hidden() -> dict[str, str]:
    """Return by package what scripts in the current folder import in place of the installed one. Nothing is imported.

    The finder of an editable installation comes after that of folders, and would find the package itself.
    """
    hidden = {}
    modules = [entry for entry in _entries() if entry.suffix == ".py" or os.path.isfile(entry / "__init__.py")]
    names = [entry.stem for entry in modules if entry.stem.isidentifier() and not entry.stem.startswith("__")]
    for package in dict.fromkeys([*filter(_version, PACKAGES), *sorted(names)]):
        spec = PathFinder.find_spec(package, ["", *sys.path])  # "" is the current folder
        installed = importlib.util.find_spec(package)
        if spec and installed and spec.origin != installed.origin:
            place = spec.origin or next(iter(spec.submodule_search_locations or ()))
            found_first = f"scripts in this folder find {place} before the installed {package}"
            hidden[package] = f"{found_first}: rename it, or start them elsewhere"
    return hidden


def _entries() -> list[Path]:
    """Return what is in the current folder; nothing if it cannot be read."""
    try:
        return [*Path.cwd().iterdir()]
    except OSError:  # a folder that was deleted, or of somebody else
        return []


def _seen_by_scripts() -> dict[str, Any]:
    """Return what a script without `import hf_muon` sees. Runs in a new process, because this one has imported it."""
    process = subprocess.run([sys.executable, trial.__file__], capture_output=True, text=True, check=False)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return {**trial.NOTHING, "reason": last}
    result: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return result
