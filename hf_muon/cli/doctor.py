"""`hf-muon doctor`: whether `optim: muon` is accepted here, and why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_muon._autoload import HOOKS
from hf_muon.cli.console import JsonOption, console, print_json
from hf_muon.diagnostics.log import EVERY, OF_LLAMAFACTORY, REPORT, is_on
from hf_muon.versions import NEEDED, remark

VARIABLES = ("HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", EVERY, REPORT, OF_LLAMAFACTORY)
PACKAGES = ("hf_muon", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "llamafactory")


def doctor(
    everything: Annotated[
        bool, typer.Option("--all", help="Also list what is not installed, variables that are not set, and hooks.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is installed, and whether `optim: muon` is accepted in scripts of this folder. Exits with 1 if not."""
    with console(stderr=True).status("importing torch, transformers and the programs that use them"):
        findings = _examine()
    if as_json:
        print_json(findings)
    else:
        _show(findings, everything=everything)
    if not findings["accepted"]:
        raise typer.Exit(1)


def _examine() -> dict[str, Any]:
    """Return all findings that `doctor` shows."""
    trial, hidden = _trial(), _hidden()
    needed = (*NEEDED, "peft")  # Trainer imports peft where it is installed.
    reason = trial["reason"] or next((text for package, text in hidden.items() if package in needed), None)
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "remarks": {name: text for name, version in versions.items() if version and (text := remark(name, version))},
        "entry_point": _entry_point(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "hooks": trial["states"],
        "lost": {name: HOOKS[name].lost for name, state in trial["states"].items() if state.startswith("failed")},
        "problems": {**trial["broken"], **hidden},
        "name": trial["name"],
        "taken": trial["taken"],
        "accepted": reason is None,
        "reason": reason,
    }


def _show(findings: dict[str, Any], *, everything: bool) -> None:
    screen = console()
    rows = {
        **findings["versions"],
        "entry point run by import torch": findings["entry_point"],
        **findings["variables"],
        **(findings["hooks"] if everything else {}),
    }
    table = Table(show_header=False)
    table.add_column(no_wrap=True)  # the whole name must match
    table.add_column(overflow="fold")
    for name, state in rows.items():
        if everything or state is not None:
            words = findings["remarks"].get(name)
            table.add_row(name, "-" if state is None else f"{state} ({words})" if words else state)
    screen.print(table, soft_wrap=False)

    for name, lost in findings["lost"].items():
        screen.print(f"{name} has failed: {lost}. Runs of Muon that need it are refused.", style="yellow")
    for text in findings["problems"].values():
        if text != findings["reason"]:
            screen.print(f"{text}.", style="yellow")
    if findings["accepted"]:
        screen.print(f"optim: {findings['name']} is accepted without any import.", style="green")
        for program in findings["taken"]:
            screen.print(f"In {program}, muon is an optimizer of its own. Write hf_muon there.", style="yellow")
    else:
        screen.print(f"optim: muon is NOT accepted: {findings['reason']}.", style="red")


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
    modules = [entry for entry in Path.cwd().iterdir() if entry.suffix == ".py" or (entry / "__init__.py").is_file()]
    names = [entry.stem for entry in modules if entry.stem.isidentifier() and not entry.stem.startswith("__")]
    for package in dict.fromkeys([*filter(_version, PACKAGES), *sorted(names)]):
        spec = PathFinder.find_spec(package, [os.getcwd(), *sys.path])
        installed = importlib.util.find_spec(package)
        if spec and installed and spec.origin != installed.origin:
            place = spec.origin or next(iter(spec.submodule_search_locations or ()))
            found_first = f"scripts in this folder find {place} before the installed {package}"
            hidden[package] = f"{found_first}: rename it, or start them elsewhere"
    return hidden


_TRIAL = """
import sys
sys.path[:] = [path for path in sys.path if path]  # not the current folder: nobody asked to run its files
import importlib, importlib.util, json
seen = {"name": "muon", "taken": [], "states": {}, "reason": None, "broken": {}}
line_of = lambda error: f"{type(error).__name__}: {error}".partition("\\n")[0].rstrip(".")
modules = ["torch", "transformers", "transformers.trainer_optimizer", "accelerate.accelerator", "transformers.trainer"]
try:
    for module in (*modules, "torch.distributed.checkpoint.state_dict"):
        importlib.import_module(module)
except BaseException as error:
    reason = f"{module} cannot be imported here ({line_of(error)}). Repair that first; `import hf_muon` does not help"
    seen["reason"] = reason
else:
    names = sys.modules["transformers.training_args"].OptimizerNames._value2member_map_
    handlers = sys.modules["transformers.trainer_optimizer"]._OPTIMIZER_HANDLERS
    ours = [name for name in ("hf_muon", "muon") if "hf_muon" in getattr(handlers.get(name), "__module__", "")]
    seen["name"] = next((name for name in reversed(ours) if name in names), "muon")
    if seen["name"] not in ours:
        seen["reason"] = "no hook is placed. Say `import hf_muon` in the script, or see the entry point above"
    if hooks := sys.modules.get("hf_muon._autoload"):
        for module in sorted({hook.module for hook in hooks.HOOKS.values()}):
            program = module.partition(".")[0]
            try:
                if importlib.util.find_spec(program):
                    importlib.import_module(module)
            except BaseException as error:
                if not module.startswith(getattr(error, "name", None) or " "):  # other versions have no such module
                    seen["broken"][program] = f"{program} cannot be imported here ({line_of(error)})"
        seen["states"] = hooks.status()
if seen["reason"] is None or not seen["reason"].startswith("torch "):
    from hf_muon.integrations.names import TAKEN, refuse_failed
    from hf_muon.versions import NEEDED, refuse_older
    seen["taken"] = [program for program, is_taken in TAKEN.items() if is_taken]
    try:
        refuse_failed("callback of Trainer")  # every run needs it
        refuse_older(*NEEDED)
    except RuntimeError as error:
        seen["reason"] = str(error)
print("\\n" + json.dumps(seen))
"""


def _trial() -> dict[str, Any]:
    """Return what a script without `import hf_muon` sees. Runs in a new process, because this one has imported it."""
    process = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, check=False)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return {"name": "muon", "taken": [], "states": {}, "broken": {}, "reason": last}
    result: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return result
