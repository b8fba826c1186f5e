"""Registry of rules: those of hf_muon, and those that users register."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_muon.config import GROUP_OPTIONS, MUON_OPTIONS, OPTIONS
from hf_muon.math.moments import MOMENTS, SCALES
from hf_muon.rules import balance, cautious, momentum_schedule, normalize, qk_clip
from hf_muon.rules.rule import Direction, Rule, StateKind

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (momentum_schedule.RULE, normalize.RULE, balance.RULE, cautious.RULE, qk_clip.RULE)
}
"""By name, in the order in which they apply."""


def register(rule: Rule) -> None:
    """Register a rule, whose options can then be set like those of Muon.

    Call it on every rank, before an optimizer is built.

    Raises:
        ValueError: the name of the rule, of an option or of a state is taken.
    """
    if RULES.get(rule.name) is rule:
        return
    taken = {*RULES, *OPTIONS, *state_kinds(), *MOMENTS, *SCALES, "step"}
    if used := [name for name in (rule.name, *rule.options, *rule.state) if name in taken]:
        raise ValueError(f"The rule {rule.name!r} cannot be registered: {used[0]!r} exists. Rename it [name-taken]")
    RULES[rule.name] = rule
    for table in (OPTIONS, GROUP_OPTIONS, MUON_OPTIONS):
        table.update(rule.options)


def option_names() -> list[str]:
    """Return the names of the options of all rules."""
    return [name for rule in RULES.values() for name in rule.options]


def state_kinds() -> dict[str, StateKind]:
    """Return the keys of the state of all rules, each with its kind."""
    return {key: kind for rule in RULES.values() for key, kind in rule.state.items()}


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
