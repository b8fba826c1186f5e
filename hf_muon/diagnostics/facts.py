"""What the first line of metrics says of a run: versions, machine, and its options."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

_LIBRARIES = ("transformers", "accelerate", "trl", "peft", "deepspeed", "llamafactory", "lightning")
_CPUS = Path("/proc/cpuinfo")
_OF_BOTH = ("lr", "weight_decay", "weight_rounding", "momentum_offload")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries of training that this process has imported."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {"python": platform.python_version(), **{name: str(text) for name, text in loaded.items() if text}}


def machine(device: torch.device) -> str:
    """Return the device's name; for a CPU its model, its number of cores and torch's number of threads."""
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return device.type
    return f"{os.cpu_count()} cores of {_cpu()}, {torch.get_num_threads()} threads"


def _cpu() -> str:
    try:
        lines = _CPUS.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def options(groups: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the options of the first Muon group and of the first AdamW group, as JSON holds them.

    Args:
        groups: param groups.
        names: options to return. `lr` is the rate before a scheduler has changed it, where the group has that.
    """
    chosen: dict[str, dict[str, Any]] = {}
    for group in groups:
        side = "muon" if group["use_muon"] else "adamw"
        if not group["params"] or side in chosen:
            continue
        used = [name for name in names if name in _OF_BOTH or name.startswith("adamw_") is (side == "adamw")]
        chosen[side] = {name: _plain(group[name]) for name in used if name in group}
        chosen[side]["lr"] = _plain(group.get("initial_lr", group["lr"]))
    return chosen


def _plain(value: Any) -> Any:
    """Return a value that JSON holds."""
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, bool, int, float, type(None))) else str(value)
