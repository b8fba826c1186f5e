"""Registry of rules: those of hf_muon, and those that other packages register."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from hf_muon.math.moments import MOMENTS, SCALES
from hf_muon.options.declaration import Option
from hf_muon.rules import balance, cautious, momentum_schedule, normalize, qk_clip
from hf_muon.rules.rule import Direction, Rule, StateKind

ENTRY_POINTS = "hf_muon.rules"
"""The group of entry points under which packages name their rules."""

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (momentum_schedule.RULE, normalize.RULE, balance.RULE, cautious.RULE, qk_clip.RULE)
}
"""By name, in the order in which they apply."""

BUILT_IN_OPTIONS = {name: option for rule in RULES.values() for name, option in rule.options.items()}

OTHERS_OPTIONS: dict[str, Option] = {}
"""The options of registered rules, by name."""

OWN_NAMES: set[str] = set()
"""The names of Muon's own options, which `hf_muon.config` declares."""

_ARGUMENTS = {
    "hyperparameters": "options, step",
    "update": "updates, gradients, weights, state, options, step",
    "direction": "updates, orthogonalize, state, options, step",
    "apply": "directions, weights, state, options, step, scale",
    "head_factors": "logits, heads, options",
}
"""What each function of a rule is called with."""
# Diagnostics measure the RMS of these.
_MEASURED = ("update", "weight", "momentum", "adamw_update", "adamw_weight")


def register(rule: Rule) -> None:
    """Register a rule, whose options can then be set like those of Muon.

    Register it before an optimizer is built, on every rank: by calling this, or by an entry point of the group
    ``hf_muon.rules`` that names the rule, which is loaded when an option is not known otherwise.

    Raises:
        ValueError: a name of the rule, of an option or of a state is taken, it has no function, or one that takes
            other arguments.
    """
    if not isinstance(rule, Rule):
        raise ValueError(f"register takes a hf_muon.rules.Rule, not {rule!r} [not-a-rule]")
    if RULES.get(rule.name) is rule:
        return
    for what, names, existing in (
        ("rule", [rule.name], RULES),
        ("option", rule.options, {*OWN_NAMES, *OTHERS_OPTIONS}),
        ("state", rule.state, {*state_kinds(), "step", *MOMENTS, *SCALES, *_MEASURED}),
    ):
        if used := [name for name in names if name in existing]:
            raise ValueError(
                f"The rule {rule.name!r} cannot be registered: the {what} {used[0]!r} exists. Rename it [name-taken]"
            )
    functions = {name: function for name in _ARGUMENTS if (function := getattr(rule, name)) is not None}
    if not functions:
        raise ValueError(
            f"The rule {rule.name!r} has no function. Give it one of {', '.join(_ARGUMENTS)} [rule-without-function]"
        )
    for name, function in functions.items():
        try:
            inspect.signature(function).bind(*_ARGUMENTS[name].split(", "))
        except TypeError as error:
            raise ValueError(
                f"The rule {rule.name!r} cannot be registered: {name} is called with ({_ARGUMENTS[name]}): {error} "
                "[arguments-of-rule]"
            ) from None
    RULES[rule.name] = rule
    OTHERS_OPTIONS.update(rule.options)


@cache
def load_entry_points() -> None:
    """Register the rules that installed packages name in entry points, once in a process.

    Raises:
        RuntimeError: a package's rule cannot be loaded.
    """
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            register(entry.load())
        except Exception as error:
            raise RuntimeError(
                f"The rule {entry.name!r} of {entry.value} cannot be loaded: {type(error).__name__}: {error}. Mend or "
                "uninstall its package [rule-not-loaded]"
            ) from error


def option_names() -> list[str]:
    """Return the names of the options of all rules."""
    return [name for rule in RULES.values() for name in rule.options]


def state_kinds() -> dict[str, StateKind]:
    """Return the keys of the state of all rules, each with its kind."""
    return {key: kind for rule in RULES.values() for key, kind in rule.state.items()}


def non_negative() -> set[str]:
    """Return the keys of state that are never negative."""
    return {key for rule in RULES.values() for key in rule.non_negative}


def rules_of(group: Mapping[str, Any]) -> list[Rule]:
    """Return the rules that a param group follows. Options that the group lacks have their defaults."""
    return [rule for rule in RULES.values() if rule.is_on(_with_defaults(rule, group))]


def _with_defaults(rule: Rule, group: Mapping[str, Any]) -> Mapping[str, Any]:
    missing = {name: option.default for name, option in rule.options.items() if name not in group}
    return {**group, **missing} if missing else group


def on_directions(group: Mapping[str, Any]) -> list[tuple[Rule, Direction]]:
    """Return the rules of a param group that have a `direction`, and these.

    Those with state come first: the others may orthogonalize twice, which must not move it twice.
    """
    rules = [(rule, rule.direction) for rule in rules_of(group) if rule.direction is not None]
    return sorted(rules, key=lambda pair: not pair[0].state)


def state_of(group: Mapping[str, Any]) -> dict[str, StateKind]:
    """Return the keys of the state of the rules that a param group follows, each with its kind."""
    if not group["use_muon"]:
        return {}
    return {key: kind for rule in rules_of(group) for key, kind in rule.state.items()}


def complaint(group: Mapping[str, Any]) -> str | None:
    """Return why the rules of a param group cannot be followed; None if they can."""
    rules = rules_of(group)
    for rule in rules:
        if rule.complaint is not None and (text := rule.complaint(_with_defaults(rule, group))):
            return text
    if len(decaying := [rule.name for rule in rules if rule.decays]) > 1:
        return f"{' and '.join(decaying)} each take care of weight decay: switch off one of them [two-weight-decays]"
    return None
