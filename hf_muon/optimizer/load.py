"""Load a state: bring it into a normal form, compare it with this run, and convert its tensors.

`compare` finds on one rank why a state cannot be loaded, and what a user should know about it. `load_` refuses what any
rank complains of, and only then writes: a load that fails changes nothing. Moments are matched with parameters by
position, as in torch. Options, learning rates and step counts come from the checkpoint. What `_of_run` names stays.
"""

from __future__ import annotations

import copy
import logging
import math
import numbers
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_muon.config import GROUP_OPTIONS
from hf_muon.diagnostics.log import first_few, is_rank_zero, logger
from hf_muon.distributed.ranks import Ranks, merged_texts
from hf_muon.math.moments import SCALES
from hf_muon.math.torch_private import load_hooks
from hf_muon.optimizer.agreement import differences, ranks_of
from hf_muon.optimizer.checkpoint_format import KEY as FORMAT_KEY
from hf_muon.optimizer.checkpoint_format import unpacked
from hf_muon.optimizer.groups import (
    LISTS,
    SCHEDULER_KEYS,
    check_written_option,
    combination_complaint,
)
from hf_muon.optimizer.state import (
    ALGORITHM,
    ALL_STATE_KEYS,
    DTYPE_OPTIONS,
    STATE_KEYS,
    Entry,
    blocks_complaint,
    converted,
    describe,
    dtype_of,
    entries_of,
    is_known,
)
from hf_muon.rules import registry
from hf_muon.storage.factors import KEY, factors_of, has_factors
from hf_muon.storage.tensors import STEPPED_DTYPES, has_data, is_dtensor, local_of, quoted
from hf_muon.storage.views import views_of

Group = Mapping[str, Any]

_MOST_STEPS = 2**53
"""Steps up to here are counted exactly in float64."""

_NOTICES = {
    "missing options": "the checkpoint does not say %s; this run's stay [options-of-run]",
    "state keys": "%s in the state of parameters, which Muon does not keep, is left out [state-left-out]",
    "others": "state of %s parameters that no param group holds is left out [state-left-out]",
    "options": "the checkpoint's options win over those of this run, as in any torch optimizer: %s "
    "[options-of-checkpoint]",
    "rates": "the checkpoint's learning rates win over those of this run (learning_rate, muon_lr, adamw_lr): %s. A "
    "scheduler whose state is loaded goes on from the checkpoint's, too. To change a rate, write it into param_groups "
    "and the scheduler's base_lrs, or start a new run from the checkpoint's weights [rates-of-checkpoint]",
    "dtypes": "moments are converted: %s",
    "rules": "this run's rules hold; state that they lack starts from zero: %s [rules-of-run]",
    "factors": "this run's lr_scales hold: %s [lr-scales-of-run]",
    "views": "from here on, other matrices than before are orthogonalized: %s [views-of-run]",
}
"""The log line of each kind of differences, in this order."""

# Logged as information, not as warnings.
_EXPECTED = ("others", "dtypes")
# All differences of these kinds are listed, and a few of the rest.
_OF_OPTIONS = ("options", "rates", "dtypes", "rules")


@dataclass
class Comparison:
    """The result of comparing a saved state with a run on this rank.

    Attributes:
        complaints: why the state cannot be loaded.
        differences: facts that a user should know, by kind; the texts are keys.
        groups: the param groups after the load.
        moments: the part of the saved state that is loaded, for each parameter that has some.
    """

    complaints: list[str] = field(default_factory=list)
    differences: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    groups: list[dict[str, Any]] = field(default_factory=list)
    moments: dict[Tensor, dict[str, Any]] = field(default_factory=dict)


def load_(optimizer: Optimizer, state_dict: Any) -> None:
    """Load a state dict into a `Muon`, together with all ranks that store parameters with this one.

    Raises:
        ValueError: every complaint of every rank, on all of them. Nothing was changed.
    """
    groups = optimizer.param_groups
    ranks = ranks_of(groups, getattr(optimizer, "replicate_group", None))
    state_dict = _after_hooks(optimizer, state_dict, ranks)
    try:
        comparison = compare(groups, state_dict)
        shared = list(_shared_lines(comparison))
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one's complaints
        comparison, shared = Comparison([f"it cannot be read: {type(error).__name__}: {error} [unreadable-state]"]), []
    refuse(merged_texts(ranks.texts(comparison.complaints)))
    # Without `replicate_group`: the lines are about DTensors, and ranks that share only replicas have none.
    refuse(differences(ranks_of(groups), shared))

    previous = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        optimizer.__setstate__({"state": _restored(comparison), "param_groups": comparison.groups})
        for hook in load_hooks(optimizer, "post"):
            hook(optimizer)
    except BaseException:
        optimizer.__dict__.update(previous)
        raise
    for kind, text in _NOTICES.items() if is_rank_zero() else ():
        if words := comparison.differences.get(kind):
            listed = "; ".join(words) if kind in _OF_OPTIONS else first_few(words)
            logger().log(logging.INFO if kind in _EXPECTED else logging.WARNING, text, listed)


def refuse(complaints: Sequence[str]) -> None:
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


def _after_hooks(optimizer: Optimizer, state_dict: Any, ranks: Ranks) -> Any:
    """Apply the pre-hooks that users have registered to a state dict, as `Optimizer.load_state_dict` does.

    If a hook fails on one rank, the other ranks, which wait for its complaints, refuse the load.
    """
    if not isinstance(state_dict, Mapping):
        return state_dict  # `compare` complains
    # Only to raise now, if this torch lacks them, and not after the load.
    load_hooks(optimizer, "post")
    state_dict = dict(state_dict)
    try:
        for hook in load_hooks(optimizer, "pre"):
            result = hook(optimizer, state_dict)
            state_dict = state_dict if result is None else result
    except Exception as error:
        ranks.texts([f"a hook failed: {type(error).__name__}: {error} [load-hook-failed]"])
        raise
    return state_dict


def _shared_lines(comparison: Comparison) -> Iterator[str]:
    """Yield texts that must be equal on all ranks: step counts, and moments to redistribute with their placements."""
    for k, group in enumerate(comparison.groups):
        # Without DTensors a rank may have taken other steps than another one.
        if any(map(is_dtensor, group["params"])):
            yield f"param group {k} after {group['step']} steps"
        for i, param in enumerate(group["params"]):
            if is_dtensor(param):
                saved = comparison.moments.get(param, {})
                kinds = {name: str(value.placements) for name, value in saved.items() if is_dtensor(value)}
                yield f"{describe(group, i)} with {sorted(saved)}, {f'stored as {kinds}' if kinds else 'whole'}"


@torch.inference_mode(False)  # what is copied under inference_mode could not be stepped
@torch.no_grad()
def _restored(comparison: Comparison) -> defaultdict[Tensor, dict[str, Any]]:
    """Return the state after the load: copies, stored like their parameters, in the dtypes of the groups.

    `Optimizer.load_state_dict` would cast moments to the parameters' dtype.
    """
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group in comparison.groups:
        for param, entries in zip(group["params"], entries_of(group), strict=True):
            if saved := comparison.moments.get(param):
                counts = {"step": _counter(saved["step"])} if "step" in entries else {}
                state[param] = counts | converted(param, saved, entries)
    return state


def _counter(value: Any) -> Tensor:
    if isinstance(value, Tensor) and not has_data(local_of(value)):
        return value.clone()
    return torch.tensor(float(steps_of(value) or 0), dtype=torch.float32, device="cpu")


# --- the normal form of a saved state, whatever the parameters


def _normal_groups(state_dict: Any, complaints: list[str]) -> list[dict[str, Any]]:
    """Return the param groups of a state dict, with canonical options; add to `complaints` what is wrong with it."""
    if not isinstance(state_dict, Mapping):
        complaints.append(f"it is {quoted(state_dict)}, and not an optimizer's state_dict [not-a-state]")
        return []
    groups = state_dict.get("param_groups")
    if not isinstance(groups, (list, tuple)) or not isinstance(state_dict.get("state"), Mapping):
        keys = sorted(map(str, state_dict))
        complaints.append(f"it is not an optimizer's state_dict: its keys are {keys} [not-a-state]")
        return []
    for k, group in enumerate(groups):
        if not isinstance(group, Mapping):
            complaints.append(f"its param group {k} is {quoted(group)}, and not a mapping [not-a-mapping]")
            return []
        if missing := [key for key in ("use_muon", FORMAT_KEY) if key not in group]:
            keys = sorted(str(key) for key in group if key != "params")
            listing = f"its param groups hold {keys}, and `{missing[0]}` is not among them"
            complaints.append(f"it was written by another optimizer: {listing} [foreign-state]")
            return []
    try:
        groups = list(map(unpacked, groups))
    except ValueError as error:
        complaints.append(f"it has {error}")
        return []
    normal = []
    for k, group in enumerate(groups):
        lines = list(_entry_complaints(group))
        if "step" not in group:
            lines.append("lacks `step`, the number of steps that it has taken [no-steps]")
        # torch adds it to the defaults of a loaded optimizer, and so to groups that are added later.
        normal.append({name: value for name, value in group.items() if name != "differentiable"})
        for name in GROUP_OPTIONS.keys() & group.keys():
            try:
                normal[k][name] = check_written_option(name, group[name])
            except ValueError as error:
                lines.append(f"has {error}")
        complaints += [f"its param group {k} {line}" for line in lines]
    if not complaints and len(keys := [key for group in groups for key in group["params"]]) > len(set(keys)):
        complaints.append("its param groups name a parameter twice [parameter-twice]")
    return normal


def _entry_complaints(group: Group) -> Iterator[str]:
    """Return complaints about the entries of a saved param group other than options."""
    if not isinstance(group["use_muon"], bool):
        yield f"has use_muon={quoted(group['use_muon'])}. Valid: true or false [invalid-value]"
    params = group.get("params")
    if not isinstance(params, (list, tuple)) or not all(isinstance(key, Hashable) for key in params):
        yield f"has params={quoted(params)}, and not a list of its parameters [no-params]"
    if "step" in group and steps_of(group["step"]) is None:
        yield f"has step={quoted(group['step'])}, and not a number of steps [no-steps]"
    for name, complaint_of in LISTS.items():
        if complaint := complaint_of(group.get(name)):
            yield f"has {name}: {complaint} [not-one-for-each]"
    for name in SCHEDULER_KEYS:
        if name in group and _number(group[name]) is None:
            yield f"has {name}={quoted(group[name])}, and not a number [invalid-value]"


def steps_of(value: Any) -> int | None:
    """Return a number of steps as an int, whatever kind of number stores it; None for anything else."""
    number = _number(value)
    return int(number) if number is not None and number == int(number) and 0 <= number <= _MOST_STEPS else None


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


# --- the comparison


def compare(groups: Sequence[Group], state_dict: Any) -> Comparison:
    """Compare a saved state with the param groups that it is to be loaded into. Nothing is changed or sent.

    Args:
        groups: the param groups of a `Muon`.
        state_dict: anything.
    """
    comparison = Comparison()
    saved_groups = _normal_groups(state_dict, comparison.complaints)
    comparison.complaints = comparison.complaints or list(_parameter_complaints(groups, saved_groups))
    if comparison.complaints:
        return comparison
    saved_state = state_dict["state"]
    for k, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        merged = _merged(group, saved)
        comparison.groups.append(merged)
        comparison.complaints += _list_complaints(group, saved)
        if complaint := combination_complaint(merged):
            comparison.complaints.append(f"a step would refuse param group {k}: {complaint}")
        comparison.complaints += _state_complaints(group, saved, saved_state, comparison.moments)
        for kind, text in _differences(group, saved):
            comparison.differences[kind][text] = None
    keys = {key: None for saved in saved_groups for key in saved["params"]}
    states = [values for key in keys if isinstance(values := saved_state.get(key), Mapping)]
    unknown = (str(name) for values in states for name in values if not is_known(name))
    comparison.differences["state keys"] = dict.fromkeys(unknown)
    if count := len(saved_state.keys() - keys):
        comparison.differences["others"][str(count)] = None
    return comparison


def _merged(group: Group, saved: Group) -> dict[str, Any]:
    """Return a param group after the load: the options of the checkpoint, but for those of `_options_of_run`.

    Views and factors follow from the model, and saved moments do not depend on them.
    """
    of_model = ("params", "views", KEY)
    of_run = {name: group[name] for name in (*of_model, *_options_of_run()) if name in group}
    defaults = {name: group[name] for name in (*GROUP_OPTIONS, "param_names") if name in group}
    loaded = {name: copy.deepcopy(value) for name, value in saved.items() if name not in of_model}
    return {**defaults, **loaded, **of_run, "step": steps_of(saved["step"])}


def _options_of_run() -> tuple[str, ...]:
    """Return the options of this run that a load keeps, for storage and rules: a checkpoint is converted to them."""
    return ("momentum_dtype", "adamw_state_dtype", "weight_rounding", *registry.option_names())


def _parameter_complaints(groups: Sequence[Group], saved_groups: Sequence[Group]) -> Iterator[str]:
    """Say which parameters a saved state lacks, has too many or routes differently: by name, or else by number."""
    if all(group.get("param_names") for group in (*groups, *saved_groups)):
        routes = {name: bool(group["use_muon"]) for group in groups for name in group["param_names"]}
        saved = {name: bool(group["use_muon"]) for group in saved_groups for name in group["param_names"]}
        if missing := [name for name in routes if name not in saved]:
            yield (
                f"it does not have {first_few(missing)} ({len(saved)} parameters, this optimizer {len(routes)}) "
                "[other-parameters]"
            )
        if extra := [name for name in saved if name not in routes]:
            yield f"it has {first_few(extra)}, which this optimizer does not train [other-parameters]"
        if changed := [name for name in routes if routes[name] != saved.get(name, routes[name])]:
            listing = first_few(f"{name} ({ALGORITHM[saved[name]]} there)" for name in changed)
            yield (
                f"the routing changed for {listing}: route them as there (muon_patterns, adamw_patterns) or start from "
                "the weights alone [routing-changed]"
            )
        if missing or extra or changed:
            return
    sides = [
        [(len(group["params"]), ALGORITHM[group["use_muon"]]) for group in side] for side in (saved_groups, groups)
    ]
    if sides[0] != sides[1]:
        words = [
            f"{sum(count for count, _ in side)} parameters in groups of {' + '.join(f'{n} {kind}' for n, kind in side)}"
            for side in sides
        ]
        yield (
            f"it has {words[0]}, this optimizer has {words[1]}: the model, what of it is trained, or the routing "
            "differs [groups-differ]"
        )


def _list_complaints(group: Group, saved: Group) -> Iterator[str]:
    """Say which lists of a saved param group have not one text or number for each parameter, or another order."""
    names, saved_names = group.get("param_names") or (), saved.get("param_names") or ()
    # A flat partition replaces many parameters: its group has more names than `params`, here and in the state.
    counts = (0, len(names), len(group.get("views") or ()), len(group["params"]))
    for name in LISTS:
        if (count := len(saved.get(name) or ())) not in counts:
            yield f"it has {count} {name} for {len(group['params'])} parameters [not-one-for-each]"
    if names and saved_names and list(names) != list(saved_names):
        yield "the same parameters stand in another order, and state is matched by position [other-order]"
    for i, param in enumerate(group["params"]):
        if complaint := blocks_complaint(group, param):
            yield f"{describe(group, i)} {complaint}"


def _state_complaints(
    group: Group, saved: Group, state: Mapping[Any, Any], moments: dict[Tensor, dict[str, Any]]
) -> Iterator[str]:
    """Say why the saved state of a group's parameters cannot be loaded; put what is loaded of it into `moments`.

    Moments must be stored like their parameter, or whole.
    """
    rules, absent, any_moments = registry.state_of(group), [], False
    # By the options that wrote the state, which may have had another dtype.
    saved_entries = entries_of({**saved, "params": group["params"]})
    for i, (param, key, entries) in enumerate(zip(group["params"], saved["params"], saved_entries, strict=True)):
        values = {} if state.get(key) is None else state[key]
        if not isinstance(values, Mapping):
            yield f"{describe(group, i)}: its state is {quoted(values)}, and not a mapping [not-a-mapping]"
            continue
        needed = {name: entry for name, entry in entries.items() if name in ALL_STATE_KEYS or name in rules}
        if missing := [name for name in needed if name not in values]:
            absent.append(f"{describe(group, i)} lacks {missing}")
        for name, entry in needed.items() if not missing else ():
            if complaint := _form_complaint(name, values[name], entry, param):
                yield f"{describe(group, i)}: its {name} {complaint}"
        # DCP keeps the scales of its template if moments were saved without scales.
        unneeded = values.keys() & ALL_STATE_KEYS - needed.keys()
        if extra := [name for name in unneeded if SCALES.get(name) not in needed]:
            use_muon = bool(group["use_muon"])
            yield (
                f"{describe(group, i)}: its state holds {first_few(sorted(extra))}, which {ALGORITHM[use_muon]} "
                f"({', '.join(STATE_KEYS[use_muon])}) does not keep [foreign-moments]"
            )
        if not ALL_STATE_KEYS.isdisjoint(values):
            any_moments = True
            moments[param] = {name: values[name] for name in needed if name in values}
    # A state saved before the first step is empty. An incomplete state, or none after steps, has lost moments.
    if absent and (steps_of(saved["step"]) or any_moments):
        yield f"moments are missing: {first_few(absent)} [moments-missing]"


def _form_complaint(name: str, value: Any, entry: Entry, param: Tensor) -> str | None:
    """Say why a saved value cannot be what a parameter's state has under a key; None where it can.

    Its numbers are trusted: a version that reads this format has written them, and no step writes others.
    """
    has_values = not isinstance(value, Tensor) or has_data(local_of(value))
    if not has_values and has_data(local_of(param)):
        return "is on the meta device, where it has no values [moment-on-meta]"
    if name == "step":
        is_count = not has_values or steps_of(value) is not None
        return None if is_count else f"is {quoted(value)}, and not a number of steps [no-steps]"
    if not isinstance(value, Tensor):
        return f"is {quoted(value)}, and not a tensor [not-a-tensor]"
    if not entry.fits(value):
        return f"has shape {tuple(value.shape)}, not {entry.shape or 'a flat one'} [moment-shape]"
    is_code = not entry.dtype.is_floating_point
    dtypes = (entry.dtype,) if is_code or not entry.sharded else STEPPED_DTYPES
    if value.dtype not in dtypes or value.layout != torch.strided:
        return f"has dtype {value.dtype} and layout {value.layout} [moment-dtype]"
    if is_dtensor(value) and value.device_mesh != getattr(param, "device_mesh", None):  # type: ignore[attr-defined]
        return (
            f"is sharded over mesh {value.device_mesh.mesh.tolist()}, and the parameter is not. Load it through "  # type: ignore[attr-defined]
            "torch.distributed.checkpoint.state_dict, which moves state between layouts [moment-mesh]"
        )
    return None


def _differences(group: Group, saved: Group) -> Iterator[tuple[str, str]]:
    """Yield the differences between a saved param group and this run's: a key of `_NOTICES`, and a text."""
    of_rules, of_run, use_muon = registry.option_names(), _options_of_run(), bool(group["use_muon"])
    for name, option in sorted(GROUP_OPTIONS.items()):
        if name in of_rules:
            value = saved.get(name, option.default)
            if name in group and group[name] != value:
                yield "rules", f"{name} {group[name]!r} here, {value!r} in the checkpoint"
        elif name not in of_run and name not in saved:
            yield "missing options", name
        elif name not in ("lr", *of_run) and group[name] != saved[name]:
            yield "options", f"{name} {saved[name]!r}, not {group[name]!r}"
    dtypes = [dtype_of(side).replace("auto", "fp32") for side in (saved, group)]
    if dtypes[0] != dtypes[1]:
        yield "dtypes", f"{DTYPE_OPTIONS[use_muon]} {dtypes[0]} in the checkpoint, {dtypes[1]} here"
    # torch's schedulers keep the rate before any schedule in `initial_lr`.
    rates = [float(side.get("initial_lr", side.get("lr", group["lr"]))) for side in (saved, group)]
    if not math.isclose(*rates, rel_tol=1e-6):
        unsure = "" if "initial_lr" in group and "initial_lr" in saved else ", unless a schedule has made it so"
        yield "rates", f"{ALGORITHM[use_muon]}'s {rates[0]:.6g}, not {rates[1]:.6g}{unsure}"
    names = group.get("param_names") or []
    if has_factors(group) or has_factors(saved):
        for i, (factor, saved_factor) in enumerate(zip_longest(factors_of(group), factors_of(saved), fillvalue=1.0)):
            if factor != saved_factor:
                name = names[i] if i < len(names) else f"parameter {i}"
                yield "factors", f"{name} lr x {factor:g}, there {saved_factor:g}"
    for i, (view, saved_view) in enumerate(zip(views_of(group), views_of(saved), strict=True)):
        if use_muon and view != saved_view:
            stored = "as it is stored"
            yield "views", f"{describe(group, i)} {view or stored!r}, there {saved_view or stored!r}"
