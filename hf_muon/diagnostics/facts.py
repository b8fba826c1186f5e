"""What the first line of metrics says of a run: versions of libraries, and its options."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_LIBRARIES = ("hf_muon", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "llamafactory", "lightning")
_OF_BOTH = ("lr", "weight_decay", "weight_rounding", "momentum_offload")


def versions() -> dict[str, str]:
    """Return the versions of the libraries of training that this process has imported."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {name: str(text) for name, text in loaded.items() if text}


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
