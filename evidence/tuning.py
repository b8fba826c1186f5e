"""The search for a side's best settings, one rule for all sides: which point to try next, from the losses so far.

A side tunes one setting or several, each on a ladder: a start times powers of a factor, which has no end, or a list of
choices, which has. A point is a rung on each ladder. The search begins at the starts and asks for the neighbours of the
best point, one ladder after another, until both neighbours on every ladder are worse. So a grid extends itself while
its best point is at an edge, and ends with the best inside, unless a list of choices ends there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Point = tuple[Fraction, ...]
"""A rung on each ladder; rung 0 is the start."""
Value = float | str

_FINEST = 4  # halvings of the distance between rungs


@dataclass(frozen=True)
class Ladder:
    """The values of one setting.

    Attributes:
        start: the value to begin with.
        factor: between neighbours; 0 if there are choices.
        choices: all values, in order; empty if there is a factor.
        times: name of the setting that the value is a multiple of; empty if it is the value itself.
    """

    start: Value
    factor: float = 0.0
    choices: tuple[Value, ...] = ()
    times: str = ""

    def value(self, rung: Fraction) -> Value:
        """Return the value of a rung, rounded to three digits if there are no choices."""
        if self.choices:
            return self.choices[self.choices.index(self.start) + int(rung)]
        return float(f"{float(self.start) * self.factor ** float(rung):.3g}")

    def has(self, rung: Fraction) -> bool:
        """Return whether a rung exists."""
        if not self.choices:
            return True
        return rung.denominator == 1 and 0 <= self.choices.index(self.start) + rung < len(self.choices)


def best_point(losses: Mapping[Point, float]) -> Point | None:
    """Return the point with the lowest loss; of points that all diverged, the one with the lowest first setting."""
    return min(losses, key=lambda point: (losses[point], point), default=None)


def next_point(ladders: Sequence[Ladder], losses: Mapping[Point, float]) -> Point | None:
    """Return the point to try next, or None if the best one is inside.

    Args:
        ladders: of the settings that a side tunes.
        losses: of the points that were tried; infinite if a trial diverged or failed.
    """
    whole = {point: loss for point, loss in losses.items() if _is_whole(point)}
    best = best_point(whole)
    if best is None:
        return tuple(Fraction(0) for _ in ladders)
    return next((point for point in _neighbours(ladders, best, Fraction(1)) if point not in losses), None)


def finer_point(ladders: Sequence[Ladder], losses: Mapping[Point, float]) -> Point | None:
    """Return a point between the best one and its neighbours, for a side with trials left; None if there is none."""
    best = best_point({point: loss for point, loss in losses.items() if _is_whole(point)})
    for halving in range(1, _FINEST + 1):
        for point in _neighbours(ladders, best or (), Fraction(1, 2**halving)):
            if point not in losses:
                return point
    return None


def is_inside(ladders: Sequence[Ladder], losses: Mapping[Point, float]) -> bool:
    """Return whether the best point is finite, and no neighbour of it is untried."""
    return next_point(ladders, losses) is None and math.isfinite(min(losses.values(), default=math.inf))


def _is_whole(point: Point) -> bool:
    return all(rung.denominator == 1 for rung in point)


def _neighbours(ladders: Sequence[Ladder], point: Point, distance: Fraction) -> Iterator[Point]:
    """Yield the points at a distance of rungs on one ladder, the lower one first."""
    for i, ladder in enumerate(ladders):
        for step in (-distance, distance):
            if ladder.has(point[i] + step):
                yield (*point[:i], point[i] + step, *point[i + 1 :])
