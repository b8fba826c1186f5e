"""Param groups: which keys they may hold, and the checks of a group before it is added and before each step."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_muon.config import GROUP_OPTIONS, OPTIONS, MuonConfig, check_option, option_of
from hf_muon.diagnostics.log import first_few
from hf_muon.math.coefficients import resolve
from hf_muon.math.precision import compute_dtype
from hf_muon.math.update import check_scale
from hf_muon.optimizer.state import blocks_complaint, describe
from hf_muon.rules import registry
from hf_muon.storage import factors, views
from hf_muon.storage.tensors import has_data, quoted, shape_of, storage_complaint

SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""Numbers that torch's schedulers keep in param groups."""

OWN_KEYS = ("params", "param_names", "use_muon", "views", factors.KEY, "step")
"""Keys of param groups other than options."""

RENAMED = {"betas": "adamw_betas", "eps": "adamw_eps"}
"""Names of our options in torch.optim.AdamW."""

ONLY_DEFAULT = ("capturable", "differentiable", "maximize", "amsgrad")
"""Options of torch.optim.AdamW that are off here."""

SPEED_ONLY = ("foreach", "fused")
"""Options of torch.optim.AdamW that choose among implementations of one step."""

# A key of a program's own that is at least so much like one of ours is taken for a typo, by difflib's ratio.
_TYPO = 0.75

LISTS = {"views": views.texts_complaint, "param_names": views.texts_complaint, factors.KEY: factors.list_complaint}
"""What is wrong with a list of a param group that has an entry for each parameter, by its key."""

# LinearLR and others compute a rate from the one before, and may end this far below 0.
_RATE_ROUNDING = 1e-12


def with_checked_options(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group with its options in their canonical form.

    Raises:
        ValueError: a key that is taken for an option and is none, or an option that is not valid.
    """
    group = dict(param_group)
    # torch adds it to a loaded optimizer's defaults.
    if not group.get("differentiable"):
        group.pop("differentiable", None)
    refuse_unknown(group)
    group.update({name: check_option(name, group[name]) for name in GROUP_OPTIONS.keys() & group.keys()})
    return group


def refuse_unknown(group: Mapping[str, Any]) -> None:
    """Raise if a key of a param group looks like an option and is none, or `use_muon` is neither true nor false.

    Programs have their keys in param groups, as `is_last_layer` of DINOv2. They stay there, and do nothing.

    Raises:
        ValueError: the key, and the option that may be meant.
    """
    refuse_other_than_default(group)
    if not isinstance(group.get("use_muon", True), bool):
        raise ValueError(f"use_muon={quoted(group['use_muon'])} is not valid. Valid: true or false [invalid-value]")
    for theirs, ours in RENAMED.items():
        if theirs in group:
            raise ValueError(f"{theirs!r} is {ours!r} in a param group of Muon: write group[{ours!r}] [unknown-option]")
    names = (*GROUP_OPTIONS, *OWN_KEYS)
    for name in group.keys() - {*names, *SCHEDULER_KEYS, *SPEED_ONLY, *ONLY_DEFAULT}:
        is_meant = name in OPTIONS or "muon" in name or "adamw" in name
        if is_meant or difflib.get_close_matches(name[:100], names, n=1, cutoff=_TYPO):
            option_of(name, GROUP_OPTIONS, more=("params", "use_muon", "views"))


def refuse_other_than_default(options: Mapping[str, Any]) -> None:
    """Raise if arguments or a param group set an option that only torch's AdamW has.

    Raises:
        ValueError: the option.
    """
    for name in ONLY_DEFAULT:
        if options.get(name):
            raise ValueError(
                f"{name}={quoted(options[name])} is of torch.optim.AdamW, and Muon has its default alone: "
                "leave it out [only-default]"
            )


def check_names(group: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a param group names its parameters and others do not, or the other way round.

    Raises:
        ValueError: what to pass.
    """
    params = group["params"] if not isinstance(group["params"], torch.Tensor) else [group["params"]]
    # An iterator is not read here; torch says the same of it.
    if not others or not isinstance(params, Sequence) or not params:
        return
    is_named = "param_names" in group or isinstance(params[0], tuple)
    if is_named != ("param_names" in others[0]):
        what = "(name, parameter) pairs" if not is_named else "parameters without names"
        raise ValueError(
            f"param group {len(others)} {'names its parameters' if is_named else 'has no names'}, unlike the others: "
            f"pass {what}. MuonOfGroups and build_optimizer take both, and find names in the model [names-differ]"
        )


def check_written_option(name: str, value: Any) -> Any:
    """Return the canonical form of an option in a param group, which a schedule may have written.

    Raises:
        ValueError: as `check_option`, but a learning rate may be negative by a rounding error.
    """
    if name == "lr" and _is_rounded_zero(value):
        return value if isinstance(value, torch.Tensor) else 0.0
    return check_option(name, value)


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group; 0 where a schedule has ended a rounding error below it."""
    return 0.0 if _is_rounded_zero(group["lr"]) else float(group["lr"])


def number_of(group: Mapping[str, Any]) -> int:
    """Return the number of a group's next step, from one; all partitions of a group have the same."""
    return int(group["step"]) + 1  # people write floats


def _is_rounded_zero(rate: Any) -> bool:
    if isinstance(rate, torch.Tensor):
        if rate.numel() != 1 or rate.is_complex() or not has_data(rate):
            return False
        rate = rate.item()
    return isinstance(rate, numbers.Real) and rate < 0 and not rate < -_RATE_ROUNDING


def complete_group_(group: dict[str, Any]) -> None:
    """Set the number of steps of a new group, and raise unless every parameter can be stepped.

    Checkpoints hold the number, whatever `auto` means later.

    Raises:
        ValueError: a Muon group with something that is not a matrix, views, names or factors that do not fit the
            parameters, or options that do not go together.
        RuntimeError: a parameter stored in a way that this version cannot step.
    """
    group["ns_steps"] = len(resolve(group["ns_coefficients"], group["ns_steps"]))
    if complaints := list(list_complaints(group)):
        raise ValueError(complaints[0])
    for i, (param, view) in enumerate(zip(group["params"], views.views_of(group), strict=True)):
        if complaint := storage_complaint(param) or blocks_complaint(group, param):
            raise RuntimeError(f"{describe(group, i)} {complaint}")
        if group["use_muon"] and (complaint := views.complaint(view, shape_of(param))):
            raise ValueError(
                f"{describe(group, i)} {complaint}: Muon steps (m, n) matrices and (B, m, n) stacks of matrices. Put "
                "it into a group with use_muon=False, or let build_optimizer(model) or MuonOfGroups decide "
                "[not-a-matrix]"
            )
    if complaint := hyperparameter_complaint(group):
        raise ValueError(complaint)


def list_complaints(group: Mapping[str, Any]) -> Iterator[str]:
    """Yield which lists of a group have not one text or number for each parameter."""
    for key, complaint_of in LISTS.items():
        if complaint := complaint_of(group.get(key), len(group["params"])):
            yield (
                f"{key}: {complaint}; give each one, '' or 1 for none. To change `params` later, freeze some with "
                "requires_grad_(False), or add some with add_param_group [not-one-for-each]"
            )


def hyperparameter_complaint(group: Mapping[str, Any], devices: Sequence[torch.device] | None = None) -> str | None:
    """Return why the options of a group cannot work, by themselves, together, or on a device; None if they can.

    Schedulers, hooks and users write into groups between steps, so a step checks them again if they have changed.

    Args:
        group: the param group.
        devices: where its matrices are orthogonalized; None before that is known.
    """
    try:
        refuse_unknown(group)
        for name, option in GROUP_OPTIONS.items():
            # A rule may have been registered after the group was made. Muon's own options are always there.
            missing = None if name in MuonConfig.__dataclass_fields__ else option.default
            check_written_option(name, group.get(name, missing))
    except ValueError as error:
        return str(error)
    return combination_complaint(group, devices)


def combination_complaint(group: Mapping[str, Any], devices: Sequence[torch.device] | None = None) -> str | None:
    """Return why options of a group that are valid by themselves cannot work together or on a device; None if they can.

    Args:
        group: the param group.
        devices: on which its matrices are orthogonalized; None before that is known.
    """
    if devices is None:
        # Skip the CPU when an accelerator exists: the model may not have been moved yet.
        skips_cpu = torch.accelerator.is_available()
        devices = [d for d in {param.device for param in group["params"]} if d.type != "cpu" or not skips_cpu]
    try:
        resolve(group["ns_coefficients"], group["ns_steps"])
        check_scale(group["adjust_lr_fn"], group["update_rms"])
        if group["use_muon"]:
            for device in devices:
                compute_dtype(group["ns_dtype"], device.type, device.index)
    except ValueError as error:
        return str(error)
    return registry.complaint(group)


def rounding_complaint(group: Mapping[str, Any]) -> str | None:
    """Return why the weights of a group cannot be rounded as it asks for; None if they can.

    Not for a group that is only made: DeepSpeed and FSDP2 may still make fp32 copies of fp16 weights.
    """
    if group["weight_rounding"] == "nearest":
        return None
    names = [describe(group, i) for i, param in enumerate(group["params"]) if param.dtype is torch.float16]
    if not names:
        return None
    return (
        f"weights are stored in fp16, for which there is no stochastic rounding: {first_few(names)}. Load the model in "
        "bf16 or fp32 (from_pretrained(..., dtype=torch.bfloat16)); autocast computes in fp16 with fp32 weights, too. "
        "To round fp16 weights to nearest, which loses small updates, write weight_rounding=nearest [fp16-weights]"
    )
