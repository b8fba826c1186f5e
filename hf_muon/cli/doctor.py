"""`hf-muon doctor`: whether `optim: muon` is accepted here, and why not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_muon._autoload import HOOKS
from hf_muon.cli.console import console, print_json
from hf_muon.diagnostics.log import EVERY, OF_LLAMAFACTORY, REPORT, is_on

VARIABLES = ("HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", EVERY, REPORT, OF_LLAMAFACTORY)
PACKAGES = ("hf_muon", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "llamafactory")


def doctor(
    everything: Annotated[
        bool, typer.Option("--all", help="Also list what is not installed, variables that are not set, and hooks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is installed, and whether `optim: muon` is accepted. Exits with 1 if it is not."""
    findings = _examine()
    if as_json:
        print_json(findings)
    else:
        _show(findings, everything=everything)
    if not findings["accepted"]:
        raise typer.Exit(1)


def _examine() -> dict[str, Any]:
    """Return all findings that `doctor` shows."""
    trial = _trial()
    lost = {name: HOOKS[name].lost for name, state in trial["states"].items() if state.startswith("failed")}
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "entry_point": _entry_point(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "hooks": trial["states"],
        "lost": lost,
        "newton_schulz": trial["dtypes"],
        "name": trial["name"],
        "accepted": trial["accepted"],
        "reason": None if trial["accepted"] else _reason(trial, versions["transformers"]),
    }


def _reason(trial: dict[str, Any], transformers: str | None) -> str:
    """Return why `optim: muon` is not accepted, and what to do."""
    stage, error = trial["stage"], trial["error"]
    if stage == "torch":
        return f"torch cannot be imported here ({error}). Repair that first"
    if stage == "transformers" and transformers is None:
        return "transformers is not installed here (pip install transformers)"
    if stage in ("transformers", "trainer"):
        return f"transformers cannot be imported here ({error}). Repair that first; `import hf_muon` does not help"
    if stage == "registry":
        return (
            f"transformers {transformers} has no registry of optimizers ({error}). Install 5.5.4 or newer; "
            "`import hf_muon` does not help"
        )
    if stage == "versions":
        return str(error)
    failures = [f"{name}: {state}" for name, state in trial["states"].items() if state.startswith("failed")]
    if failures:
        return f"hooks have failed, and `import hf_muon` does not help ({'; '.join(failures)})"
    return "no hook is placed. Say `import hf_muon` in the script, or see the entry point above"


def _show(findings: dict[str, Any], *, everything: bool) -> None:
    screen = console()
    rows = {
        **findings["versions"],
        "entry point run by import torch": findings["entry_point"],
        **findings["variables"],
        **(findings["hooks"] if everything else {}),
    }
    table = Table(show_header=False)
    table.add_column(no_wrap=True)  # a name is searched for as a whole
    table.add_column(overflow="fold")
    for name, state in rows.items():
        if everything or state is not None:
            table.add_row(name, "-" if state is None else state)
    screen.print(table, soft_wrap=False)

    dtypes = ", ".join(f"{dtype} on {device}" for device, dtype in findings["newton_schulz"].items()) or "no dtype"
    screen.print(f"Newton-Schulz runs in {dtypes}")
    for name, lost in findings["lost"].items():
        sentence = f"{name} has failed: {lost}. Runs of Muon that need it are refused."
        screen.print(sentence, style="yellow", markup=False, highlight=False)
    if findings["accepted"]:
        screen.print(f"optim: {findings['name']} is accepted without any import.", style="green")
    else:
        sentence = f"optim: muon is NOT accepted: {findings['reason']}."
        screen.print(sentence, style="red", markup=False, highlight=False)
    installed = ", ".join(f"{package} {version}" for package, version in findings["versions"].items() if version)
    state = "accepted" if findings["accepted"] else f"not accepted ({findings['reason']})"
    without = f", without {', '.join(findings['lost'])}" if findings["lost"] else ""
    odd = "".join(f", {name}={value}" for name, value in findings["variables"].items() if value is not None)
    screen.print("\nIn a bug report, send this sentence:")
    screen.print(
        f"optim: {findings['name']} is {state} with {installed} on {platform.platform()}, "
        f"Newton-Schulz in {dtypes}{without}{odd}.",
        markup=False,
        highlight=False,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _entry_point() -> str:
    """Return what `import torch` does with the entry point in this environment."""
    points = [p for p in importlib.metadata.entry_points(group="torch.backends") if p.name == "hf_muon"]
    if not points:
        return "not found: hf_muon is not installed here (pip install hf_muon); `import hf_muon` works, too"
    torch_loads = os.environ.get(VARIABLES[1], "1") == "1"  # any other text is off for torch
    for variable, acts in zip(VARIABLES, (is_on(VARIABLES[0], unset=True), torch_loads), strict=False):
        if not acts:
            return f"switched off by {variable}; `import hf_muon` in the script works still"
    return f"found: {points[0].value}"


# `stage` names the last step that began, which is the one that failed.
_TRIAL = """
import json, sys
seen = {"accepted": False, "name": "muon", "states": {}, "dtypes": {}, "stage": "torch", "error": None}
try:
    import torch
    seen["stage"] = "transformers"
    from transformers.training_args import OptimizerNames
    seen["stage"] = "registry"
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
    seen["stage"] = "names"
    for name in ("hf_muon", "muon"):  # the last one that is ours
        handler = _OPTIMIZER_HANDLERS.get(name)
        if name in OptimizerNames._value2member_map_ and handler.__module__.startswith("hf_muon"):
            seen["accepted"], seen["name"] = True, name
    seen["stage"] = "trainer"
    import accelerate.accelerator, torch.distributed.checkpoint.state_dict, transformers.trainer
    seen["stage"] = "hooks"
    if seen["accepted"]:
        from hf_muon.integrations.names import refuse_failed
        refuse_failed("callback of Trainer")  # which every run needs
except BaseException as error:
    seen["accepted"] = False
    seen["error"] = f"{type(error).__name__}: {error}".partition("\\n")[0].rstrip(".")
if "hf_muon._autoload" in sys.modules:
    seen["states"] = sys.modules["hf_muon._autoload"].status()
if seen["accepted"]:
    from hf_muon.versions import NEEDED, refuse_older
    try:
        refuse_older(*NEEDED)
    except RuntimeError as error:
        seen.update(accepted=False, stage="versions", error=str(error))
if seen["stage"] != "torch":
    from hf_muon.math.precision import compute_dtype
    devices = {"cpu": ("cpu",), **({"cuda": ("cuda", 0)} if torch.cuda.is_available() else {})}
    seen["dtypes"] = {name: str(compute_dtype("auto", *of)).removeprefix("torch.") for name, of in devices.items()}
print(json.dumps(seen))
"""


def _trial() -> dict[str, Any]:
    """Return what a script without `import hf_muon` sees, in a new process: this one has imported hf_muon."""
    process = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, check=False)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return {"accepted": False, "name": "muon", "states": {}, "dtypes": {}, "stage": "torch", "error": last}
    result: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return result
