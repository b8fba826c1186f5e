"""Checks whether a state dict is the state of a `Muon` over the same parameters; nothing is changed.

`form_complaints` checks what any state of a `Muon` must look like. `fit_complaints` compares its param groups with the
optimizer's, and then every moment with its parameter: shape, dtype, placement, numbers. Each complaint is a sentence.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.config import GROUP_OPTIONS
from hf_muon.diagnostics.log import first_few
from hf_muon.math.moments import MOMENTS, SCALES
from hf_muon.optimizer import rule_state
from hf_muon.optimizer.groups import SCHEDULER_KEYS, check_written_option
from hf_muon.optimizer.state import (
    ALL_STATE_KEYS,
    STATE_KEYS,
    blocks_complaint,
    describe,
    has_own,
    state_dtype,
    state_keys,
    state_shape,
)
from hf_muon.options.declaration import quoted
from hf_muon.rules import registry
from hf_muon.storage.factors import KEY, factors_of, has_factors, list_complaint
from hf_muon.storage.tensors import STEPPED_DTYPES, has_data, is_dtensor, local_of

Group = Mapping[str, Any]

_MOST_STEPS = 2**53
"""Steps up to here are counted exactly in float64."""


def check_loadable(groups: Sequence[Group], state_dict: Any) -> None:
    """Raise unless `state_dict` is the state of a `Muon` over the same parameters.

    Raises:
        ValueError: every complaint at once. Nothing was changed.
    """
    refuse_load(list(load_complaints(groups, state_dict)))


def refuse_load(complaints: Sequence[str]) -> None:
    """Raise if there are complaints.

    Raises:
        ValueError: every complaint at once. Nothing was changed.
    """
    if complaints:
        raise ValueError(
            "This optimizer state cannot be loaded, and nothing was changed:\n  - "
            + "\n  - ".join(complaints)
            + "\nResume with the model and the options that wrote it, or start from its weights without the optimizer."
        )


def load_complaints(groups: Sequence[Group], state_dict: Any) -> Iterator[str]:
    """Say why `state_dict` is not the state of a `Muon` over the same parameters."""
    malformed = list(form_complaints(state_dict))
    yield from malformed
    if not malformed:
        yield from fit_complaints(groups, with_steps(state_dict))


# --- form: whatever the parameters


def form_complaints(state_dict: Any) -> Iterator[str]:
    """Say why something does not have the form of a `Muon`'s state dict."""
    if not isinstance(state_dict, Mapping):
        yield f"it is {quoted(state_dict)}, and not an optimizer's state_dict [not-a-state]"
        return
    groups = state_dict.get("param_groups")
    if not isinstance(groups, (list, tuple)) or not isinstance(state_dict.get("state"), Mapping):
        yield f"it is not an optimizer's state_dict: its keys are {sorted(map(str, state_dict))} [not-a-state]"
        return
    for k, group in enumerate(groups):
        if not isinstance(group, Mapping):
            yield f"its param group {k} is {quoted(group)}, and not a mapping [not-a-mapping]"
            return
        if "use_muon" not in group:
            known = sorted(str(key) for key in group if key != "params")
            listing = f"its param groups hold {known}, and `use_muon` is not among them"
            yield f"it was written by another optimizer: {listing} [foreign-state]"
            return
    any_steps = any("step" in group for group in groups)
    for k, group in enumerate(groups):
        if any_steps and "step" not in group:
            yield f"its param group {k} lacks `step`, the number of steps that it has taken [no-steps]"
        for complaint in _group_complaints(group):
            yield f"its param group {k} {complaint}"
    keys = [key for group in groups if _are_keys(group.get("params")) for key in group["params"]]
    if len(set(keys)) < len(keys):
        yield "its param groups name a parameter twice [parameter-twice]"


def _are_keys(params: Any) -> bool:
    return isinstance(params, (list, tuple)) and all(isinstance(key, Hashable) for key in params)


def _group_complaints(group: Group) -> Iterator[str]:
    if not isinstance(group["use_muon"], bool):
        yield f"has use_muon={quoted(group['use_muon'])}. Valid: true or false [invalid-value]"
    if not _are_keys(group.get("params")):
        yield f"has params={quoted(group.get('params'))}, and not a list of its parameters [no-params]"
    if "step" in group and steps_of(group["step"]) is None:
        yield f"has step={quoted(group['step'])}, and not a number of steps [no-steps]"
    for name in ("param_names", "views"):
        words = group.get(name)
        texts = isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words)
        if words is not None and not texts:
            yield f"has {name}={quoted(words)}, and not a text for each parameter [not-one-for-each]"
    if complaint := list_complaint(group.get(KEY)):
        yield f"has {KEY}: {complaint} [not-one-for-each]"
    for name in SCHEDULER_KEYS:
        if name in group and _number(group[name]) is None:
            yield f"has {name}={quoted(group[name])}, and not a number [invalid-value]"
    if group.get("differentiable"):
        yield (
            f"has differentiable={quoted(group['differentiable'])}: steps of Muon cannot be differentiated "
            "[differentiable]"
        )


# --- fit: the same param groups, in the same order


def fit_complaints(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Say why a state dict of the right form does not fit an optimizer's param groups."""
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    counts = [len(group["params"]) for group in groups]
    saved_counts = [len(group["params"]) for group in saved_groups]
    routes = [bool(group["use_muon"]) for group in groups]
    saved_routes = [bool(group["use_muon"]) for group in saved_groups]
    if differences := _differences_by_name(groups, saved_groups):
        yield from differences
        return
    if (counts, routes) != (saved_counts, saved_routes):
        yield (
            f"it has {_counted(saved_counts, saved_routes)}, this optimizer has {_counted(counts, routes)}: "
            "the model, what of it is trained, or the routing differs [groups-differ]"
        )
        return
    for group, saved in zip(groups, saved_groups, strict=True):
        # A flat partition stands for many parameters: its group has more names than `params`, here and in the state.
        for name in ("param_names", "views"):
            own, there = group.get(name) or [], saved.get(name) or []
            if there and len(there) not in (len(own), len(group["params"])):
                yield f"it has {len(there)} {name} for {len(group['params'])} parameters [not-one-for-each]"
        if has_factors(saved) and len(factors_of(saved)) not in (
            len(group.get("param_names") or []),
            len(group["params"]),
        ):
            yield f"it has {len(factors_of(saved))} lr_factors for {len(group['params'])} parameters [not-one-for-each]"
        invalid = [error for name in GROUP_OPTIONS.keys() & saved.keys() if (error := _option_error(name, saved[name]))]
        yield from (f"one of its param groups has {error}" for error in invalid)
        for i, param in enumerate(group["params"]):
            if complaint := blocks_complaint(group, param):
                yield f"{describe(group, i)} {complaint}"
        names, saved_names = group.get("param_names"), saved.get("param_names")
        if names and saved_names and list(names) != list(saved_names):
            yield "the same parameters stand in another order, and state is matched by position [other-order]"
        if not invalid:  # the options say which state there is
            yield from _state_complaints(group, saved, state)


def _option_error(name: str, value: Any) -> str:
    try:
        check_written_option(name, value)
    except ValueError as error:
        return str(error)
    return ""


def _counted(counts: Sequence[int], routes: Sequence[bool]) -> str:
    parts = [f"{count} {'Muon' if muon else 'AdamW'}" for count, muon in zip(counts, routes, strict=True)]
    return f"{sum(counts)} parameters in groups of {' + '.join(parts)}"


def _differences_by_name(groups: Sequence[Group], saved_groups: Sequence[Group]) -> list[str]:
    """Return which parameters are missing, too many or routed differently; nothing where either side lacks names."""
    if not all(group.get("param_names") for group in (*groups, *saved_groups)):
        return []
    here = {name: group["use_muon"] for group in groups for name in group["param_names"]}
    there = {name: group["use_muon"] for group in saved_groups for name in group["param_names"]}
    complaints = []
    missing = [name for name in here if name not in there]
    extra = [name for name in there if name not in here]
    changed = [name for name in here if name in there and here[name] != there[name]]
    if missing:
        complaints.append(
            f"it does not have {first_few(missing)} ({len(there)} parameters, this optimizer {len(here)}) "
            "[other-parameters]"
        )
    if extra:
        complaints.append(f"it has {first_few(extra)}, which this optimizer does not train [other-parameters]")
    if changed:
        routes = [f"{name} ({'Muon' if there[name] else 'AdamW'} there)" for name in changed]
        complaints.append(
            f"the routing changed for {first_few(routes)}: route them as there (muon_patterns, adamw_patterns) or "
            "start from the weights alone [routing-changed]"
        )
    return complaints


# --- moments: whole, stored like their parameter, with numbers that a step can use


def _state_complaints(group: Group, saved: Group, state: Mapping[Any, Any]) -> Iterator[str]:
    absent = []
    for i, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
        moments = state.get(key)
        if moments is not None and not isinstance(moments, Mapping):
            yield f"{describe(group, i)}: its state is {quoted(moments)}, and not a mapping [not-a-mapping]"
            continue
        keys = state_keys(saved, param)
        needed = [name for name in rule_state.rule_keys(saved) if name in rule_state.rule_keys(group)]
        missing = [name for name in (*keys, *needed) if name not in (moments or {})]
        if missing:
            absent.append((describe(group, i), missing))
        elif moments:
            complaints = [(name, _moment_complaint(name, moments[name], param, saved)) for name in keys]
            complaints += [
                (name, _rule_complaint(name, moments[name], {**saved, "params": group["params"]}, i)) for name in needed
            ]
            yield from (f"{describe(group, i)}: its {name} {complaint}" for name, complaint in complaints if complaint)
        # DCP leaves the scales of its template beside moments that were saved without any.
        known = {*keys, *(MOMENTS[key].scale for key in keys if key in MOMENTS)}
        if moments and (extra := sorted((moments.keys() & ALL_STATE_KEYS) - known)):
            yield (
                f"{describe(group, i)}: its state holds {first_few(extra)}, which {_algorithm(saved)} does not "
                "keep [foreign-moments]"
            )
    # A state saved before the first step is empty. An incomplete state, or none after steps, has lost moments.
    any_moments = any(has_own(state.get(key)) for key in saved["params"])
    if absent and (steps_of(saved["step"]) or any_moments):
        yield f"moments are missing: {first_few([f'{name} lacks {keys}' for name, keys in absent])} [moments-missing]"


def _algorithm(group: Group) -> str:
    return f"{'Muon' if group['use_muon'] else 'AdamW'} ({', '.join(STATE_KEYS[bool(group['use_muon'])])})"


def _moment_complaint(name: str, value: Any, param: Tensor, saved: Group) -> str | None:
    """Say why a saved value cannot be this moment of a parameter; None where it can."""
    if isinstance(value, Tensor) and not has_data(local_of(value)):
        if has_data(local_of(param)):
            return "is on the meta device, where it has no values [moment-on-meta]"
    elif name == "step" and steps_of(value) is None:
        return f"is {quoted(value)}, and not a number of steps [no-steps]"
    if name == "step":
        return None
    if not isinstance(value, Tensor):
        return f"is {quoted(value)}, and not a tensor [not-a-tensor]"
    if tuple(value.shape) != state_shape(param, name):
        return f"has shape {tuple(value.shape)} [moment-shape]"
    dtype = state_dtype(param, name, saved)
    has_codes = not dtype.is_floating_point
    if value.dtype not in ((dtype,) if has_codes else STEPPED_DTYPES) or value.layout != torch.strided:
        layout = f" and layout {value.layout}" if value.layout != torch.strided else ""
        return f"has dtype {value.dtype}{layout} [moment-dtype]"
    if is_dtensor(value):
        mesh, partial = value.device_mesh, [p for p in value.placements if p.is_partial()]  # type: ignore[attr-defined]
        if mesh != getattr(param, "device_mesh", None):
            return (
                f"is sharded over mesh {mesh.mesh.tolist()}, and the parameter is not. Load it through "
                "torch.distributed.checkpoint.state_dict, which moves state between layouts [moment-mesh]"
            )
        if partial:
            return f"is stored as {partial[0]}, as terms of a sum [moment-partial]"
    limit = float(torch.iinfo(dtype).max if has_codes else torch.finfo(dtype).max)
    if name.startswith("momentum") and not has_codes:
        limit /= 2  # a step computes the difference between momentum and gradient, whose signs may differ
    return _numbers_complaint(name, local_of(value.detach()), limit)


def _rule_complaint(name: str, value: Any, saved: Group, index: int) -> str | None:
    """Say why a saved value cannot be a parameter's state of a rule; None where it can."""
    if complaint := rule_state.complaint(saved, index, name, value):
        return complaint
    return _numbers_complaint(name, local_of(value.detach()), math.inf)


def _numbers_complaint(name: str, value: Tensor, limit: float) -> str | None:
    if not value.numel() or not has_data(value):
        return None
    low, high = (float(end) for end in torch.aminmax(value))  # both are NaN where an entry is
    if not (math.isfinite(low) and math.isfinite(high)):
        return "is not finite [moment-not-finite]"
    if (name == "exp_avg_sq" or name in SCALES or name in registry.non_negative()) and low < 0:
        return f"has negative entries, {low:.3g} among them [negative-moment]"
    if max(-low, high) > limit:
        return (
            f"has entries as large as {max(-low, high):.3g}, where a step computes with {limit:.3g} at most "
            "[moment-too-large]"
        )
    return None


# --- numbers of any kind


def steps_of(value: Any) -> int | None:
    """Return a number of steps as an int, whatever kind of number stores it; None for anything else."""
    number = _number(value)
    return int(number) if number is not None and number == int(number) and 0 <= number <= _MOST_STEPS else None


def with_steps(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict whose param groups count steps.

    Those of the oldest format do not, only AdamW's parameters do. The largest of their counts stands for all groups.
    """
    groups = state_dict["param_groups"]
    if any("step" in group for group in groups):
        return state_dict
    keys = [key for group in groups if not group["use_muon"] for key in group["params"]]
    moments = [state_dict["state"].get(key) for key in keys]
    steps = max((steps_of(state.get("step")) or 0 for state in moments if isinstance(state, Mapping)), default=0)
    return {**state_dict, "param_groups": [{**group, "step": steps} for group in groups]}


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1 and has_data(local_of(value)):
        value = local_of(value).item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
