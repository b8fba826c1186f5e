"""What the final trials of a cell allow to say, in sentences."""

from __future__ import annotations

from collections.abc import Mapping

from evidence.significance import LEVEL, Difference, smallest_shown

_LEAST_PAIRS = 3


def verdict(test: Difference) -> str:
    """Return in words what a difference shows."""
    if test.pairs < _LEAST_PAIRS:
        return f"nothing yet: {test.pairs} seed{'s' * (test.pairs > 1)}"
    if test.mean == test.deviation == 0:
        return "equal"
    if test.p < LEVEL:
        return "lower loss" if test.mean < 0 else "higher loss"
    return "no difference shown"


def conclusion(cell: str, tests: Mapping[str, Difference]) -> str:
    """Return what may be concluded of a cell and what not; empty where no side has three pairs.

    Args:
        cell: its name.
        tests: the differences of sides from their references, by side.
    """
    enough = {side: test for side, test in tests.items() if test.pairs >= _LEAST_PAIRS}
    by_verdict: dict[str, list[str]] = {}
    for side in sorted(enough, key=lambda side: -abs(enough[side].mean)):
        by_verdict.setdefault(verdict(enough[side]), []).append(side)

    def listed(key: str) -> str:
        return ", ".join(f"{side} ({enough[side].mean:+.3f})" for side in by_verdict[key])

    sentences = [
        f"{key.capitalize()} than the reference: {listed(key)}."
        for key in ("lower loss", "higher loss")
        if key in by_verdict
    ]
    if "equal" in by_verdict:
        sentences.append(f"Equal to the last digit: {', '.join(by_verdict['equal'])}.")
    if undecided := by_verdict.get("no difference shown"):
        limits = [smallest_shown(enough[side]) for side in undecided]
        low, high = f"{min(limits):.2g}", f"{max(limits):.2g}"
        limit = low if low == high else f"{low} to {high}, by the side's spread,"
        sentences.append(
            f"No difference shown: {listed('no difference shown')}. Equality is not shown either: "
            f"with these seeds only a mean difference beyond {limit} would count."
        )
    return f"*{cell}.* {' '.join(sentences)}" if sentences else ""
