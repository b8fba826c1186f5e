"""`hf-muon`: the command line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hf_muon.cli_convert import convert
from hf_muon.cli_inspect import inspect
from hf_muon.cli_plan import plan
from hf_muon.cli_report import report

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The Muon optimizer for Hugging Face training.")

PACKAGES = ("hf_muon", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "llamafactory")


@app.command()
def doctor() -> None:
    """Tell what is installed, what is hooked, and why not. Exits with 1 if `optim: muon` is not accepted."""
    console = Console(soft_wrap=True)
    versions = Table("package", "version", title="installed", title_justify="left")
    versions.add_row("python", platform.python_version())
    for package in PACKAGES:
        versions.add_row(package, _version(package) or "not installed")
    console.print(versions)

    hooks = Table("what", "state", title="how optim: muon gets in", title_justify="left")
    hooks.add_row("entry point run by import torch", _entry_point())
    for variable in ("HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        hooks.add_row(variable, os.environ.get(variable, "not set"))
    trial = _trial()
    for name, state in trial["states"].items():
        missing = _version(name.partition(".")[0]) is None
        hooks.add_row(name, f"{state} (not installed)" if missing else state)
    console.print(hooks)

    from hf_muon.newton_schulz import compute_dtype

    dtypes = {"cpu": compute_dtype("auto", "cpu")}
    import torch

    if torch.cuda.is_available():
        dtypes["cuda"] = compute_dtype("auto", "cuda", 0)
    console.print("Newton-Schulz runs in " + ", ".join(f"{dtype} on {device}" for device, dtype in dtypes.items()))
    if trial["accepted"]:
        console.print("optim: muon is accepted without any import.", style="green")
        return
    reason = trial.get("error") or "no hook is placed"
    console.print(f"optim: muon is NOT accepted without `import hf_muon` in the script: {reason}", style="red")
    raise typer.Exit(1)


app.command()(inspect)
app.command()(plan)
app.command()(report)
app.command()(convert)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _entry_point() -> str:
    """What `import torch` by itself makes of the entry point in this environment."""
    found = [p for p in importlib.metadata.entry_points(group="torch.backends") if p.name == "hf_muon"]
    if not found:
        return "not found: hf_muon is not installed here (pip install hf_muon); `import hf_muon` works, too"
    for variable in ("HF_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
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
