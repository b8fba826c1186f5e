"""`hf-muon`: the command line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_muon.cli_convert import convert
from hf_muon.cli_inspect import inspect
from hf_muon.cli_plan import plan
from hf_muon.cli_report import report

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The Muon optimizer for Hugging Face training.")

VARIABLES = ("HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "HF_MUON_DIAG")
PACKAGES = ("hf_muon", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "llamafactory")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Tell what is installed, what is hooked, and why not. Exits with 1 if `optim: muon` is not accepted."""
    found = _examined()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    if not found["accepted"]:
        raise typer.Exit(1)


def _examined() -> dict[str, Any]:
    """All that `doctor` finds out."""
    import torch

    from hf_muon.newton_schulz import compute_dtype

    dtypes = {"cpu": compute_dtype("auto", "cpu")}
    if torch.cuda.is_available():
        dtypes["cuda"] = compute_dtype("auto", "cuda", 0)
    trial = _trial()
    return {
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}},
        "entry_point": _entry_point(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "hooks": trial["states"],
        "newton_schulz": {device: str(dtype).removeprefix("torch.") for device, dtype in dtypes.items()},
        "accepted": trial["accepted"],
        "reason": None if trial["accepted"] else trial.get("error") or "no hook is placed",
    }


def _show(found: dict[str, Any]) -> None:
    console = Console(soft_wrap=True)
    versions = Table("package", "version", title="installed", title_justify="left")
    for package, version in found["versions"].items():
        versions.add_row(package, version or "not installed")
    console.print(versions)

    hooks = Table("what", "state", title="how optim: muon gets in", title_justify="left")
    hooks.add_row("entry point run by import torch", found["entry_point"])
    for variable, value in found["variables"].items():
        hooks.add_row(variable, "not set" if value is None else value)
    for name, state in found["hooks"].items():
        hooks.add_row(name, state + _absence(name))
    console.print(hooks)

    dtypes = ", ".join(f"{dtype} on {device}" for device, dtype in found["newton_schulz"].items())
    console.print(f"Newton-Schulz runs in {dtypes}")
    if found["accepted"]:
        console.print("optim: muon is accepted without any import.", style="green")
    else:
        console.print(
            f"optim: muon is NOT accepted without `import hf_muon` in the script: {found['reason']}", style="red"
        )
    installed = ", ".join(f"{package} {version}" for package, version in found["versions"].items() if version)
    state = "accepted" if found["accepted"] else f"not accepted ({found['reason']})"
    odd = "".join(f", {name}={value}" for name, value in found["variables"].items() if value is not None)
    console.print("\nIn a bug report, send this sentence:")
    console.print(
        f"optim: muon is {state} with {installed} on {platform.platform()}, Newton-Schulz in {dtypes}{odd}.",
        markup=False,
        highlight=False,
    )


app.command()(inspect)
app.command()(plan)
app.command()(report)
app.command()(convert)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _absence(module: str) -> str:
    """Why a hooked module will not be imported; found by its file, because importing its package takes long."""
    package, *parts = module.split(".")
    if _version(package) is None:
        return " (not installed)"
    spec = importlib.util.find_spec(package)
    files = [Path(folder, *parts) for folder in (spec and spec.submodule_search_locations) or ()]
    here = any(file.with_suffix(".py").exists() or file.is_dir() for file in files)
    return "" if here else f" (not in this {package})"


def _entry_point() -> str:
    """What `import torch` by itself makes of the entry point in this environment."""
    found = [p for p in importlib.metadata.entry_points(group="torch.backends") if p.name == "hf_muon"]
    if not found:
        return "not found: hf_muon is not installed here (pip install hf_muon); `import hf_muon` works, too"
    for variable in VARIABLES[:2]:
        if os.environ.get(variable, "1").strip().lower() in ("0", "false", "off", "no"):
            return f"switched off by {variable}; `import hf_muon` in the script works still"
    return f"found: {found[0].value}"


_TRIAL = """
import json, torch
from transformers.training_args import OptimizerNames
from transformers import trainer_optimizer
accepted = "muon" in OptimizerNames._value2member_map_ and "muon" in trainer_optimizer._OPTIMIZER_HANDLERS
import sys
states = sys.modules["hf_muon._autoload"].status() if "hf_muon._autoload" in sys.modules else {}
print(json.dumps({"accepted": accepted, "states": states}))
"""


def _trial() -> dict[str, Any]:
    """What a script finds that does not import hf_muon; in a process of its own, because this one has imported it."""
    done = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"accepted": False, "states": {}, "error": last}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """The console script."""
    app(prog_name="hf-muon")


if __name__ == "__main__":
    main()
