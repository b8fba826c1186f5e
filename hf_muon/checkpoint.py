"""Loading optimizer state that fits, or refusing it before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.config import GROUP_OPTIONS, check_option
from hf_muon.update import momentum_dtype

STATE_KEYS = {True: ("momentum_buffer",), False: ("step", "exp_avg", "exp_avg_sq")}
"""State of a parameter by `use_muon`."""


def describe(group: Mapping[str, Any], index: int) -> str:
    """A parameter by name where the group has names, else by position and shape."""
    names = group.get("param_names")
    shape = tuple(group["params"][index].shape)
    return f"{names[index]} {shape}" if names else f"parameter {index} {shape}"


def _few(items: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown


def check_loadable(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise unless `state_dict` is the state of a `Muon` over the same parameters.

    Raises:
        ValueError: every complaint at once. Nothing was changed.
    """
    complaints = list(_complaints(groups, state_dict))
    if complaints:
        raise ValueError(
            "This optimizer state cannot be loaded, and nothing was changed:\n  - "
            + "\n  - ".join(complaints)
            + "\nResume with the model and the options that wrote it, or start from its weights without the optimizer."
        )


def _complaints(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> Iterator[str]:
    saved_groups = state_dict.get("param_groups")
    if not isinstance(saved_groups, list) or not isinstance(state_dict.get("state"), Mapping):
        yield f"it is not an optimizer's state_dict: its keys are {sorted(map(str, state_dict))}"
        return
    if any("use_muon" not in group for group in saved_groups):
        known = sorted(key for key in saved_groups[0] if key != "params")
        yield f"it was written by another optimizer: its param groups hold {known}, and `use_muon` is not among them"
        return
    counts = [len(group["params"]) for group in groups]
    saved_counts = [len(group["params"]) for group in saved_groups]
    routes = [bool(group["use_muon"]) for group in groups]
    saved_routes = [bool(group["use_muon"]) for group in saved_groups]
    moved = _moved(groups, saved_groups)
    if moved:
        yield from moved
        return
    if (counts, routes) != (saved_counts, saved_routes):
        yield (
            f"it has {_shape_of(saved_counts, saved_routes)}, this optimizer has {_shape_of(counts, routes)}: "
            "the model, what of it is trained, or the routing differs"
        )
        return
    for group, saved in zip(groups, saved_groups, strict=True):
        for name in GROUP_OPTIONS.keys() & saved.keys():
            try:
                check_option(name, saved[name])
            except ValueError as error:
                yield f"one of its param groups has {error}"
        names, saved_names = group.get("param_names"), saved.get("param_names")
        if names and saved_names and names != saved_names:
            yield "the same parameters stand in another order, and state is matched by position"
        yield from _state_complaints(group, saved, state_dict["state"])


def _shape_of(counts: Sequence[int], routes: Sequence[bool]) -> str:
    parts = [f"{count} {'Muon' if muon else 'AdamW'}" for count, muon in zip(counts, routes, strict=True)]
    return f"{sum(counts)} parameters in groups of {' + '.join(parts)}"


def _moved(groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Differences by name, where both sides have names."""
    if not all(group.get("param_names") for group in (*groups, *saved_groups)):
        return []
    here = {name: group["use_muon"] for group in groups for name in group["param_names"]}
    there = {name: group["use_muon"] for group in saved_groups for name in group["param_names"]}
    complaints = []
    missing = [name for name in here if name not in there]
    extra = [name for name in there if name not in here]
    changed = [name for name in here if name in there and here[name] != there[name]]
    if missing:
        complaints.append(f"it does not have {_few(missing)} ({len(there)} parameters, this optimizer {len(here)})")
    if extra:
        complaints.append(f"it has {_few(extra)}, which this optimizer does not train")
    if changed:
        routes = [f"{name} ({'Muon' if there[name] else 'AdamW'} there)" for name in changed]
        complaints.append(f"the routing changed for {_few(routes)}")
    return complaints


def _state_complaints(group: Mapping[str, Any], saved: Mapping[str, Any], state: Mapping[Any, Any]) -> Iterator[str]:
    keys = STATE_KEYS[bool(group["use_muon"])]
    absent = []
    for i, key in enumerate(saved["params"]):
        found = state.get(key) or {}
        missing = [name for name in keys if name not in found]
        if missing:
            absent.append((describe(group, i), missing))
            continue
        for name in keys:
            shape = tuple(group["params"][i].shape)
            if name != "step" and tuple(found[name].shape) != shape:
                yield f"{describe(group, i)}: its {name} has shape {tuple(found[name].shape)}"
            elif not torch.as_tensor(found[name]).is_floating_point():
                yield f"{describe(group, i)}: its {name} has dtype {found[name].dtype}"
            elif not bool(torch.as_tensor(found[name]).isfinite().all()):
                yield f"{describe(group, i)}: its {name} is not finite"
    # A state saved before the first step is empty; half a state means that moments were lost on the way.
    if absent and any(state.get(key) for key in saved["params"]):
        yield f"moments are missing: {_few([f'{name} lacks {m}' for name, m in absent])}"


def changed_options(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> str:
    """Options other than the learning rate, which schedulers own, in which a run differs from its checkpoint."""
    changes = {
        f"{name} {saved[name]!r}, not {group[name]!r}"
        for group, saved in zip(groups, state_dict["param_groups"], strict=True)
        for name in GROUP_OPTIONS
        if name != "lr" and name in saved and check_option(name, saved[name]) != group[name]
    }
    return "; ".join(sorted(changes))


def restore_precision_(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Any]], state_dict: Mapping[str, Any]
) -> None:
    """Put back what `Optimizer.load_state_dict` cast to the parameters' dtype, and give up memory shared with the file.

    The momentum is at least fp32 whatever was saved, so that a step never mixes dtypes.
    """
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            loaded, original = state.get(param), state_dict["state"].get(key)
            if not loaded or not original:
                continue
            for name, value in original.items():
                if not isinstance(value, Tensor):
                    continue
                if name == "momentum_buffer":
                    loaded[name] = value.to(device=param.device, dtype=momentum_dtype(param), copy=True)
                elif loaded[name] is value:
                    loaded[name] = value.clone()
