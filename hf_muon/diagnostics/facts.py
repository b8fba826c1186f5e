"""Facts about a run for the first line of metrics: versions of libraries, options, and parameters."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

_LIBRARIES = ("hf_muon", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "llamafactory", "lightning")
# Options without the prefix `adamw_` that AdamW's groups follow, too.
_OF_BOTH = ("lr", "weight_decay", "weight_rounding")


def versions() -> dict[str, str]:
    """Return the versions of the training libraries that this process has imported."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {name: str(text) for name, text in loaded.items() if text}


def options(groups: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the options of the first Muon group and of the first AdamW group, as JSON holds them.

    Args:
        groups: param groups.
        names: options to return. `lr` is the rate before the scheduler changes it, if the group has that.
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


def layers_and_kinds(names: Sequence[str]) -> list[tuple[int | None, str]]:
    """Return the layer and the kind of each parameter: `model.layers.3.mlp.up_proj.weight` is `mlp.up_proj` in layer 3.

    If a model has several stacks of layers, the kind begins with the stack.
    """
    split: list[tuple[int | None, str, str]] = []
    for name in names:
        name = re.sub(r"(\.default)?\.weight(?=$|\[)", "", name)
        match = re.match(r"(?:(.*?)\.)?(\d+)\.(.+)$", name)
        if match is None:
            split.append((None, "", name))
        else:
            split.append((int(match[2]), match[1] or "", re.sub(r"(?<=\.)\d+(?=\.|$)", "*", match[3])))
    stacks = {stack for layer, stack, _ in split if layer is not None}
    return [
        (layer, f"{stack.rpartition('model.')[2]} {kind}" if layer is not None and len(stacks) > 1 else kind)
        for layer, stack, kind in split
    ]
