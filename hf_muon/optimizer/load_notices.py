"""What a user should know about a load that succeeded: in what the checkpoint differs from this run."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hf_muon.config import GROUP_OPTIONS, check_option
from hf_muon.diagnostics.log import first_few, is_rank_zero, logger
from hf_muon.optimizer.groups import FOREIGN_KEYS, OWN_KEYS, check_written_option
from hf_muon.optimizer.state import DTYPE_OPTIONS, describe, dtype_of
from hf_muon.rules import registry
from hf_muon.storage.factors import factors_of, has_factors
from hf_muon.storage.views import views_of

Group = Mapping[str, Any]

_OF_TORCH = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")  # options of its optimizers


class Notice(NamedTuple):
    """Something that a user should know about a load that succeeded."""

    level: int
    text: str


def own_options() -> tuple[str, ...]:
    """Return the options that stay this run's, to which a checkpoint is converted: what is stored how, and rules."""
    return ("momentum_dtype", "adamw_state_dtype", "weight_rounding", "momentum_offload", *registry.option_names())


def changes(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Iterator[Notice]:
    """Yield what a user should know about the differences between a checkpoint and this run."""
    saved_groups = state_dict["param_groups"]
    if differences := changed_options(groups, saved_groups):
        text = (
            f"the checkpoint's options win over those of this run, as in any torch optimizer: {differences} "
            "[options-of-checkpoint]"
        )
        yield Notice(logging.WARNING, text)
    if differences := changed_rates(groups, saved_groups):
        yield Notice(
            logging.WARNING,
            "the checkpoint's learning rates win over those of this run (learning_rate, muon_lr, adamw_lr): "
            f"{differences}. A scheduler whose state is loaded goes on from the checkpoint's, too. To change a rate, "
            "write it into param_groups and the scheduler's base_lrs, or start from the weights without the optimizer "
            "[rates-of-checkpoint]",
        )
    if differences := changed_dtypes(groups, saved_groups):
        yield Notice(logging.INFO, f"moments are converted: {differences}")
    if differences := changed_rules(groups, saved_groups):
        yield Notice(
            logging.WARNING,
            f"this run's rules hold; state that they lack starts from zero: {differences} [rules-of-run]",
        )
    if unknown := unknown_options(groups, saved_groups):
        yield Notice(
            logging.WARNING,
            f"the checkpoint's param groups have {unknown}, which is no option here and has no effect. If a rule of "
            "another package declares it, import that package or call hf_muon.rules.register before you build the "
            "optimizer [unknown-in-checkpoint]",
        )
    if differences := changed_factors(groups, saved_groups):
        yield Notice(logging.WARNING, f"this run's lr_scales hold: {differences} [lr-scales-of-run]")
    if differences := changed_views(groups, saved_groups):
        yield Notice(
            logging.WARNING,
            f"from here on, other matrices than before are orthogonalized: {differences} [views-of-run]",
        )


def changed_options(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the options in which the checkpoint differs from this run, without the learning rate."""
    changes = {
        f"{name} {saved[name]!r}, not {group[name]!r}"
        for group, saved in zip(groups, saved_groups, strict=True)
        for name in GROUP_OPTIONS
        if name not in ("lr", *own_options())
        and name in saved
        and check_written_option(name, saved[name]) != group[name]
    }
    return "; ".join(sorted(changes))


def changed_rates(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the learning rates in which the checkpoint differs from this run, before any schedule.

    torch's schedulers keep that rate in `initial_lr`. Where a group lacks it, its `lr` is compared.
    """
    changes: dict[str, None] = {}
    for group, saved in zip(groups, saved_groups, strict=True):
        here, there = (float(g.get("initial_lr", g["lr"])) for g in (group, saved))
        if not math.isclose(here, there, rel_tol=1e-6):
            algorithm = "Muon" if group["use_muon"] else "AdamW"
            unsure = "" if "initial_lr" in group and "initial_lr" in saved else ", unless a schedule has made it so"
            changes[f"{algorithm}'s {there:.6g}, not {here:.6g}{unsure}"] = None
    return "; ".join(changes)


def changed_dtypes(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the dtypes of moments in the checkpoint and in this run where they differ."""
    changes = set()
    for group, saved in zip(groups, saved_groups, strict=True):
        name = DTYPE_OPTIONS[group["use_muon"]]
        there, here = (dtype_of(g).replace("auto", "fp32") for g in (saved, group))
        if there != here:
            changes.add(f"{name} {there} in the checkpoint, {here} here")
    return "; ".join(sorted(changes))


def changed_rules(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the options of rules in which the checkpoint differs from this run."""
    changes = {
        f"{name} {group[name]!r} here, {saved.get(name, option.default)!r} in the checkpoint"
        for group, saved in zip(groups, saved_groups, strict=True)
        for rule in registry.RULES.values()
        for name, option in rule.options.items()
        if name in group and group[name] != check_option(name, saved.get(name, option.default))
    }
    return "; ".join(sorted(changes))


def unknown_options(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return what the checkpoint's param groups hold and neither this run's nor any option has a name for."""
    return first_few(
        {
            f"{name}={value!r:.200}": None
            for group, saved in zip(groups, saved_groups, strict=True)
            for name, value in saved.items()
            if not (name in group or name in GROUP_OPTIONS or name in OWN_KEYS or name in FOREIGN_KEYS)
            and name not in _OF_TORCH
        }
    )


def changed_factors(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the parameters whose factors of the learning rate differ from those of the checkpoint."""
    changes = []
    for group, saved in zip(groups, saved_groups, strict=True):
        if has_factors(group) or has_factors(saved):
            names = group.get("param_names") or []
            pairs = itertools.zip_longest(factors_of(group), factors_of(saved), fillvalue=1.0)
            for i, (here, there) in enumerate(pairs):
                if here != there:
                    name = names[i] if i < len(names) else f"parameter {i}"
                    changes.append(f"{name} lr x {here:g}, there {there:g}")
    return first_few(changes)


def changed_views(groups: Sequence[Group], saved_groups: Sequence[Group]) -> str:
    """Return the parameters whose views differ from those of the checkpoint."""
    changes = [
        f"{describe(group, i)} {here or 'as it is stored'!r}, there {there or 'as it is stored'!r}"
        for group, saved in zip(groups, saved_groups, strict=True)
        for i, (here, there) in enumerate(zip(views_of(group), views_of(saved), strict=True))
        if group["use_muon"] and here != there
    ]
    return first_few(changes)


def log(notices: Sequence[Notice]) -> None:
    """Log notices on rank 0."""
    if is_rank_zero():
        for notice in notices:
            logger().log(notice.level, "%s", notice.text)
