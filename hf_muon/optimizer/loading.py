"""Loading a state dict: `check` on all ranks, then `restore_`; a load that fails changes nothing.

Moments are matched with parameters by position, as in torch. Options,
learning rates and step counts come from the checkpoint; views and the options of `own_options` stay this run's.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_muon.config import GROUP_OPTIONS
from hf_muon.diagnostics.log import first_few
from hf_muon.math.torch_private import load_hooks
from hf_muon.optimizer import consensus, rule_state
from hf_muon.optimizer.groups import check_written_option, hyperparameter_complaint
from hf_muon.optimizer.load_notices import Notice, changes, own_options
from hf_muon.optimizer.state import (
    ALL_STATE_KEYS,
    converted_moments,
    describe,
    has_own,
    state_keys,
)
from hf_muon.optimizer.state_check import fit_complaints, form_complaints, refuse_load, steps_of, with_steps
from hf_muon.rules import registry
from hf_muon.storage.factors import KEY
from hf_muon.storage.tensors import has_data, is_dtensor, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Mapping[str, Any]


def run_pre_hooks(optimizer: Optimizer, state_dict: Any) -> Any:
    """Return what the optimizer's registered pre-hooks make of a state dict, as in `Optimizer.load_state_dict`.

    If a hook fails on one rank, the other ranks, which wait in `check`, refuse the load.
    """
    if not isinstance(state_dict, Mapping):
        return state_dict  # `check` refuses it
    load_hooks(optimizer, "post")  # raises before the load, not after it
    state_dict = dict(state_dict)
    try:
        for hook in load_hooks(optimizer, "pre"):
            result = hook(optimizer, state_dict)
            state_dict = state_dict if result is None else result
    except Exception as error:
        complaint = f"a hook failed: {type(error).__name__}: {error} [load-hook-failed]"
        replicate_group = getattr(optimizer, "replicate_group", None)
        consensus.complaints_of_all(optimizer.param_groups, [complaint], replicate_group)
        raise
    return state_dict


def run_post_hooks(optimizer: Optimizer) -> None:
    """Run the hooks that users have registered to run after a load."""
    for hook in load_hooks(optimizer, "post"):
        hook(optimizer)


def check(
    groups: Sequence[Group],
    state_dict: Any,
    *,
    replicate_group: ProcessGroup | None = None,
) -> tuple[dict[str, Any], list[Notice]]:
    """Check a state dict on all ranks that store parameters together.

    Args:
        groups: the param groups that it is to be loaded into.
        state_dict: anything.
        replicate_group: over which plain parameters are replicated.

    Returns:
        The state of these parameters and nothing else, with every option that the param groups need; and what to log.

    Raises:
        ValueError: every complaint of every rank, on all of them. Nothing was changed.
    """
    notices: list[Notice] = []
    complaints, transfers = [], []
    try:
        complaints = list(form_complaints(state_dict))
        if not complaints and not any("step" in group for group in state_dict["param_groups"]):
            state_dict = with_steps(state_dict)
            steps = max((group["step"] for group in state_dict["param_groups"]), default=0)
            text = (
                f"the checkpoint's param groups do not say how many steps they have taken; {steps} are assumed "
                "[steps-assumed]"
            )
            notices.append(Notice(logging.INFO, text))
        complaints = complaints or list(fit_complaints(groups, state_dict))
        if not complaints:
            state_dict = _completed(groups, state_dict, notices)
            complaints = list(_option_complaints(groups, state_dict))
        if not complaints:
            transfers = list(_transfers(groups, state_dict))
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one's complaints
        complaints = [f"it cannot be read: {type(error).__name__}: {error} [unreadable-state]"]
    refuse_load(consensus.complaints_of_all(groups, complaints, replicate_group))
    _agree(groups, transfers)
    return state_dict, notices + list(changes(groups, state_dict))


def _transfers(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Yield what must be equal on all ranks: step counts, and which moments are redistributed from which placements."""
    for k, (group, saved) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        if any(map(is_dtensor, group["params"])):  # without DTensors a rank steps on its own
            yield f"param group {k} after {steps_of(saved['step'])} steps"
        for i, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            moments = state_dict["state"].get(key) or {}
            if is_dtensor(param):
                # With a state that rank 0 has read, it alone has that of rules which are off here, and nobody takes it.
                rules = [name for name in rule_state.rule_keys(saved) if name in rule_state.rule_keys(group)]
                keys = (*state_keys(saved, param), *rules)
                moments = {name: moments[name] for name in keys if name in moments}
                kinds = {name: str(moments[name].placements) for name in moments if is_dtensor(moments[name])}
                yield f"{describe(group, i)} with {sorted(moments)}, {f'stored as {kinds}' if kinds else 'whole'}"


def _option_complaints(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Say which options a step would refuse: those of the checkpoint together with those that stay this run's."""
    for k, (group, saved) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
        if complaint := hyperparameter_complaint(_restored_group(group, saved)):
            yield f"a step would refuse param group {k}: {complaint}"


def _agree(groups: Sequence[Group], transfers: Sequence[str]) -> None:
    """Raise on all ranks unless their transfers are equal. Digests travel first; the texts only if they differ."""
    digest = hashlib.blake2b("\n".join(transfers).encode(), digest_size=8).hexdigest()
    if len(consensus.complaints_of_all(groups, [digest])) > 1:
        differing = [line for line in consensus.complaints_of_all(groups, transfers) if "[rank" in line]
        refuse_load([f"the ranks hold different states: {first_few(differing, 4, '; ')} [ranks-disagree]"])


def _completed(groups: Sequence[Group], state_dict: Mapping[str, Any], notices: list[Notice]) -> dict[str, Any]:
    """Return the state of these parameters alone, with options of this run where an older version had none."""
    saved_groups = []
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        own = {name: group[name] for name in GROUP_OPTIONS if name not in saved and name not in own_options()}
        if own:
            notices.append(
                Notice(
                    logging.WARNING, f"the checkpoint does not say {first_few(own)}; this run's stay [options-of-run]"
                )
            )
        counts = {"step": steps_of(saved["step"]), "params": list(saved["params"])}
        saved_groups.append({**own, **saved, **counts})
        saved_groups[-1].pop("differentiable", None)  # older versions saved torch's default, False
    keys = {
        key: (*state_keys(saved, param), *rule_state.rule_keys(saved))
        for group, saved in zip(groups, saved_groups, strict=True)
        for param, key in zip(group["params"], saved["params"], strict=True)
    }
    states = {key: state for key, state in state_dict["state"].items() if key in keys}
    moments = {
        key: {name: state[name] for name in keys[key] if name in state}
        for key, state in states.items()
        if has_own(state)
    }
    known = {*ALL_STATE_KEYS, *registry.state_kinds()}
    unknown = {str(name): None for state in states.values() for name in state or () if name not in known}
    if unknown:
        text = (
            f"{first_few(unknown)} in the state of parameters, which Muon does not keep, is left out [state-left-out]"
        )
        notices.append(Notice(logging.WARNING, text))
    others = len(state_dict["state"].keys() - keys.keys())
    if others:
        notices.append(
            Notice(logging.INFO, f"state of {others} parameters that no param group holds is left out [state-left-out]")
        )
    return {**state_dict, "state": moments, "param_groups": saved_groups}


# --- into the optimizer


@torch.no_grad()
def restore_(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Replace an optimizer's moments and options by those that `check` has returned.

    `Optimizer.load_state_dict` would cast moments to the parameters' dtype. Here they get this run's `momentum_dtype`
    and `adamw_state_dtype`, whatever the checkpoint's, and whole tensors are sharded like their parameters. All are
    copies.
    """
    groups = [
        _restored_group(group, saved)
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for i, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            if moments := state_dict["state"].get(key):
                state[param] = _restored_moments(group, param, moments) | rule_state.loaded(group, i, moments)
    optimizer.__setstate__({"state": state, "param_groups": groups})


def _restored_group(group: Group, saved: Group) -> dict[str, Any]:
    """Return a param group with the options of the checkpoint, in their canonical form.

    Parameters, `views`, factors and `own_options` stay this run's. Views follow from the model, and saved moments do
    not depend on them; moments are converted to this run's dtypes.
    """
    of_run = ("params", "views", KEY)
    restored = {key: copy.deepcopy(value) for key, value in saved.items() if key not in of_run}
    restored.update({name: check_written_option(name, restored[name]) for name in GROUP_OPTIONS if name in restored})
    own = {key: group[key] for key in (*of_run, *own_options()) if group.get(key) is not None}
    own |= {key: group[key] for key in (KEY, *registry.option_names()) if key in group}  # None may be a choice
    names = {"param_names": group["param_names"]} if "param_names" in group and "param_names" not in saved else {}
    return {**restored, **own, **names}


def _restored_moments(group: Group, param: Tensor, moments: Mapping[str, Any]) -> dict[str, Any]:
    steps = {} if group["use_muon"] else {"step": _counter(moments["step"])}
    return {**steps, **converted_moments(param, moments, group)}


def _counter(value: Any) -> Tensor:
    if isinstance(value, Tensor) and not has_data(local_of(value)):
        return value.clone()
    return torch.tensor(float(steps_of(value) or 0), dtype=torch.float32, device="cpu")
