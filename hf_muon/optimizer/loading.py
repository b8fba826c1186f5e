"""Loading a state dict: checked by all ranks, then stored like the parameters; or nothing is changed."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_muon.config import GROUP_OPTIONS, check_option
from hf_muon.diagnostics.log import first_few, is_rank_zero, logger
from hf_muon.optimizer import consensus
from hf_muon.optimizer.state import (
    ALL_STATE_KEYS,
    STATE_KEYS,
    converted_momentum,
    describe,
    has_own,
    momentum_dtype_of,
    state_dtype,
    state_keys,
    stored_like,
    zero_state,
)
from hf_muon.optimizer.state_check import fit_complaints, form_complaints, refuse_load, steps_of, with_steps
from hf_muon.storage.tensors import has_data, is_dtensor, local_of
from hf_muon.storage.views import views_of

Group = Mapping[str, Any]


class Notice(NamedTuple):
    """Something that a user should know of a load that went well."""

    level: int
    text: str


def run_pre_hooks(optimizer: Optimizer, state_dict: Any) -> Any:
    """Return a state dict as the optimizer's own pre-hooks leave it, in the manner of `torch.optim.Optimizer`.

    If a hook fails on one rank, the other ranks refuse the load; they wait in `check` for this one.
    """
    if not isinstance(state_dict, Mapping):
        return state_dict  # `check` refuses it
    state_dict = dict(state_dict)
    try:
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            result = hook(optimizer, state_dict)
            state_dict = state_dict if result is None else result
    except Exception as error:
        consensus.complaints_of_all(optimizer.param_groups, [f"a hook failed: {type(error).__name__}: {error}"])
        raise
    return state_dict


def run_post_hooks(optimizer: Optimizer) -> None:
    """Run the hooks that users have registered for the end of a load."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def check(groups: Sequence[Group], state_dict: Any, *, accept_rerouted: bool) -> tuple[dict[str, Any], list[Notice]]:
    """Check a state dict on all ranks that store parameters together.

    Args:
        groups: the param groups that it is to be loaded into.
        state_dict: anything.
        accept_rerouted: whether parameters may have changed sides; their moments are zero then.

    Returns:
        The state of these parameters and nothing else, with options in their canonical form; and what to log.

    Raises:
        ValueError: every complaint of every rank, on all of them. Nothing was changed.
    """
    notices: list[Notice] = []
    complaints, transfers = [], []
    try:
        complaints = list(form_complaints(state_dict))
        if not complaints and (counted := with_steps(state_dict)) is not state_dict:
            state_dict = counted
            steps = [group["step"] for group in state_dict["param_groups"]]
            text = f"the checkpoint's param groups do not say how many steps they have taken; {max(steps)} are assumed"
            notices.append(Notice(logging.INFO, text))
        if not complaints and accept_rerouted:
            state_dict, moved = reroute(groups, state_dict)
            notices += moved
        complaints = complaints or list(fit_complaints(groups, state_dict))
        if not complaints:
            transfers = list(_transfers(groups, state_dict))
    except Exception as error:  # noqa: BLE001  the other ranks wait for what this one says
        complaints = [f"it cannot be read: {type(error).__name__}: {error}"]
    refuse_load(consensus.complaints_of_all(groups, complaints))
    _agree(groups, transfers)
    state_dict = _completed(groups, state_dict, notices)
    return state_dict, notices + list(_changes(groups, state_dict))


def _transfers(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Iterator[str]:
    """What must be alike on all ranks: the number of steps, and which moments are sent from placement to placement."""
    for k, (group, saved) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        if any(map(is_dtensor, group["params"])):  # the others are stepped when their rank has gradients
            yield f"param group {k} after {steps_of(saved['step'])} steps"
        for i, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            moments = state_dict["state"].get(key) or {}
            if is_dtensor(param):
                moments = {name: moments[name] for name in state_keys(saved, param) if name in moments}
                kinds = {name: str(moments[name].placements) for name in moments if is_dtensor(moments[name])}
                yield f"{describe(group, i)} with {sorted(moments)}, {f'stored as {kinds}' if kinds else 'whole'}"


def _agree(groups: Sequence[Group], transfers: Sequence[str]) -> None:
    digest = hashlib.blake2b("\n".join(transfers).encode(), digest_size=8).hexdigest()
    if len(consensus.complaints_of_all(groups, [digest])) > 1:
        differing = [line for line in consensus.complaints_of_all(groups, transfers) if "[rank" in line]
        refuse_load([f"the ranks hold different states: {first_few(differing, 4, '; ')}"])


def _completed(groups: Sequence[Group], state_dict: Mapping[str, Any], notices: list[Notice]) -> dict[str, Any]:
    """Return the state that is loaded: of these parameters alone, and options that an older version did not have."""
    saved_groups = []
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        own = {name: group[name] for name in GROUP_OPTIONS if name not in saved and name != "momentum_dtype"}
        if own:
            notices.append(Notice(logging.WARNING, f"the checkpoint does not say {first_few(own)}; this run's stay"))
        known = {key: value for key, value in saved.items() if key != "differentiable"}  # torch's own, always false
        known["step"] = steps_of(saved["step"])
        known["params"] = list(saved["params"])
        saved_groups.append({**own, **known})
    keys = {
        key: state_keys(saved, param)
        for group, saved in zip(groups, saved_groups, strict=True)
        for param, key in zip(group["params"], saved["params"], strict=True)
    }
    moments = {key: state_dict["state"][key] for key in state_dict["state"] if key in keys}  # in the order of the state
    state = {key: {name: found[name] for name in keys[key]} for key, found in moments.items() if has_own(found)}
    unknown = {str(name): None for found in moments.values() for name in found or () if name not in ALL_STATE_KEYS}
    if unknown:
        text = f"{first_few(unknown)} in the state of parameters, which Muon does not keep, is left out"
        notices.append(Notice(logging.WARNING, text))
    others = len(state_dict["state"].keys() - keys.keys())
    if others:
        notices.append(Notice(logging.INFO, f"state of {others} parameters that no param group holds is left out"))
    return {**state_dict, "state": state, "param_groups": saved_groups}


# --- what changes


def _changes(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Iterator[Notice]:
    saved_groups = state_dict["param_groups"]
    if changes := changed_options(groups, saved_groups):
        text = f"the checkpoint's options win over those of this run, as in any torch optimizer: {changes}"
        yield Notice(logging.WARNING, text)
    if changes := changed_rates(groups, saved_groups):
        yield Notice(
            logging.WARNING,
            "the checkpoint's learning rates win over those of this run (learning_rate, muon_lr, adamw_lr): "
            f"{changes}. A scheduler whose state is loaded goes on from the checkpoint's, too. To change a rate, write "
            "it into param_groups and the scheduler's base_lrs, or start from the weights without the optimizer",
        )
    if changes := changed_momentum(groups, saved_groups):
        yield Notice(logging.INFO, f"momentum is converted: {changes}")
    if changes := changed_views(groups, saved_groups):
        yield Notice(logging.WARNING, f"from here on, other matrices than before are orthogonalized: {changes}")


def changed_options(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the options, without the learning rate, in which a run differs from its checkpoint."""
    changes = {
        f"{name} {saved[name]!r}, not {group[name]!r}"
        for group, saved in zip(groups, saved_groups, strict=True)
        for name in GROUP_OPTIONS
        if name not in ("lr", "momentum_dtype") and name in saved and check_option(name, saved[name]) != group[name]
    }
    return "; ".join(sorted(changes))


def changed_rates(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the learning rates in which a run differs from its checkpoint, before what schedules make of them.

    torch's schedulers keep that rate in `initial_lr`. Where neither side has it, the rates themselves are compared.
    """
    changes: dict[str, None] = {}
    for group, saved in zip(groups, saved_groups, strict=True):
        own, there = (float(g.get("initial_lr", g["lr"])) for g in (group, saved))
        if not math.isclose(own, there, rel_tol=1e-6):
            half = "Muon" if group["use_muon"] else "AdamW"
            unsure = "" if "initial_lr" in group and "initial_lr" in saved else ", unless a schedule has made it so"
            changes[f"{half}'s {there:.6g}, not {own:.6g}{unsure}"] = None
    return "; ".join(changes)


def changed_momentum(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return how momentum was kept where the checkpoint was written, and how it is here, if that differs."""
    changes = {
        f"{there} in the checkpoint, {here} here"
        for group, saved in zip(groups, saved_groups, strict=True)
        if group["use_muon"]
        and (there := momentum_dtype_of(saved).replace("auto", "fp32"))
        != (here := momentum_dtype_of(group).replace("auto", "fp32"))
    }
    return "; ".join(sorted(changes))


def changed_views(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the parameters that are seen as other matrices than when the checkpoint was written."""
    changes = [
        f"{describe(group, i)} {mine or 'as it is stored'!r}, there {other or 'as it is stored'!r}"
        for group, saved in zip(groups, saved_groups, strict=True)
        for i, (mine, other) in enumerate(zip(views_of(group), views_of(saved), strict=True))
        if group["use_muon"] and mine != other
    ]
    return first_few(changes)


# --- into the optimizer


@torch.no_grad()
def restore_(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Replace an optimizer's moments and options by those that `check` has returned.

    `Optimizer.load_state_dict` would cast moments to the parameters' dtype. Here momentum is kept as this run's
    `momentum_dtype` says, whatever was saved, and whole tensors of sharded parameters are cut. All tensors are copies.
    """
    groups = [
        _restored_group(group, saved)
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            if moments := state_dict["state"].get(key):
                state[param] = _restored_moments(group, param, moments)
    optimizer.__setstate__({"state": state, "param_groups": groups})


def _restored_group(group: Group, saved: Group) -> dict[str, Any]:
    """Return a param group with the options of the checkpoint, in their canonical form.

    Parameters, `views` and `momentum_dtype` stay this run's: the model decides which matrices a parameter is seen as,
    and moments depend neither on that nor on how this run keeps momentum.
    """
    restored = {key: copy.deepcopy(value) for key, value in saved.items() if key not in ("params", "views")}
    restored.update({name: check_option(name, restored[name]) for name in GROUP_OPTIONS if name in restored})
    own = {key: group[key] for key in ("params", "views", "momentum_dtype") if group.get(key) is not None}
    names = {"param_names": group["param_names"]} if "param_names" in group and "param_names" not in saved else {}
    return {**restored, **own, **names}


def _restored_moments(group: Group, param: Tensor, moments: Mapping[str, Any]) -> dict[str, Any]:
    if group["use_muon"]:
        return dict(converted_momentum(param, moments, momentum_dtype_of(group)))
    restored = {}
    for name in STATE_KEYS[False]:
        if name == "step":
            restored[name] = _counter(moments[name])
        else:
            value = stored_like(param, moments[name])
            restored[name] = value.to(device=param.device, dtype=state_dtype(param, name), copy=True)
    return restored


def _counter(value: Any) -> Tensor:
    if isinstance(value, Tensor) and not has_data(local_of(value)):
        return value.clone()
    return torch.tensor(float(steps_of(value) or 0), dtype=torch.float32, device="cpu")


def reroute(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Notice]]:
    """Return the same state in this optimizer's groups, with zero moments for parameters that have changed sides.

    Parameters are matched by name; where names are missing, or nothing has moved, the state stays as it is.
    """
    saved_groups = state_dict["param_groups"]
    if not all(len(group.get("param_names") or []) == len(group["params"]) for group in (*groups, *saved_groups)):
        return state_dict, []
    places = {
        name: (saved, key)
        for saved in saved_groups
        for name, key in zip(saved["param_names"], saved["params"], strict=True)
    }
    seen = {n: view for saved in saved_groups for n, view in zip(saved["param_names"], views_of(saved), strict=True)}
    here = {name: group["use_muon"] for group in groups for name in group["param_names"]}
    moved = [name for name in here if name in places and places[name][0]["use_muon"] != here[name]]
    if not moved or here.keys() != places.keys():
        return state_dict, []
    state, rerouted = {}, []
    for group in groups:
        like = [saved for saved in saved_groups if saved["use_muon"] == group["use_muon"]]
        names = set(group["param_names"])
        # The group's options are those of the saved group that most of its parameters were in.
        origin = max(like, key=lambda saved: len(names & set(saved["param_names"])), default=group)
        options = {key: value for key, value in origin.items() if key not in ("params", "param_names")}
        options["step"] = max(steps_of(options["step"]) or 0, 1)
        options.setdefault("momentum_dtype", "auto")
        keys = [places[name][1] for name in group["param_names"]]
        names_and_views = {"param_names": list(group["param_names"]), "views": [seen[n] for n in group["param_names"]]}
        rerouted.append({**options, "params": keys, **names_and_views})
        for name, key, param in zip(group["param_names"], keys, group["params"], strict=True):
            if name in moved:
                there = {**options, "use_muon": group["use_muon"]}
                dtype = momentum_dtype_of(there)
                state[key] = {kind: zero_state(param, kind, dtype) for kind in state_keys(there, param)}
            elif key in state_dict["state"]:
                state[key] = state_dict["state"][key]
    notice = Notice(logging.WARNING, f"moments start from zero for {first_few(moved)}, whose routing changed")
    return {**state_dict, "state": state, "param_groups": rerouted}, [notice]


def log(notices: Sequence[Notice]) -> None:
    """Log notices on rank 0."""
    if is_rank_zero():
        for notice in notices:
            logger().log(notice.level, "%s", notice.text)
