"""The search for a side's best settings, one rule for all sides: which point to try next, from the losses so far.

A side tunes one setting or several, each on a ladder: a start times powers of a factor, which has no end, or a list of
choices, which has. A point is a rung on each ladder. The search begins at the starts and asks for the neighbours of the
best point, one ladder after another, until both neighbours on every ladder are worse. So a grid extends itself while
its best point is at an edge, and ends with the best inside, unless a list of choices ends there. Of many points that
are tried once, the best one is lucky, too: the leading ones are repeated with other seeds, and their means decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

Point = tuple[int, ...]
"""A rung on each ladder; rung 0 is the start."""
Value = float | str

_LEADING = 3  # points that are repeated


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

    def value(self, rung: int) -> Value:
        """Return the value of a rung, rounded to three digits if there are no choices."""
        if self.choices:
            return self.choices[self.choices.index(self.start) + rung]
        return float(f"{float(self.start) * self.factor**rung:.3g}")

    def has(self, rung: int) -> bool:
        """Return whether a rung exists."""
        return not self.choices or 0 <= self.choices.index(self.start) + rung < len(self.choices)


def best_point(losses: Mapping[Point, float]) -> Point | None:
    """Return the point with the lowest loss; of points that all diverged, the one with the lowest first setting."""
    return min(losses, key=lambda point: (losses[point], point), default=None)


def next_point(ladders: Sequence[Ladder], losses: Mapping[Point, float]) -> Point | None:
    """Return the point to try next, or None if the best one is inside.

    Args:
        ladders: of the settings that a side tunes.
        losses: of the points that were tried; infinite if a trial diverged or failed.
    """
    best = best_point(losses)
    if best is None:
        return (0,) * len(ladders)
    return next((point for point in _neighbours(ladders, best) if point not in losses), None)


def point_to_repeat(losses: Mapping[Point, Sequence[float]]) -> Point:
    """Return the point to try with another seed: of those that lead, the one with the fewest trials.

    Args:
        losses: of each point, with one seed after another; not empty.
    """
    means = {point: fmean(own) for point, own in losses.items()}
    leading = sorted(means, key=lambda point: (means[point], point))[:_LEADING]
    return min(leading, key=lambda point: len(losses[point]))


def best_of_repeated(losses: Mapping[Point, Sequence[float]]) -> Point | None:
    """Return the point with the lowest mean, of those that were repeated if any was."""
    repeated = {point: fmean(own) for point, own in losses.items() if len(own) > 1}
    return best_point(repeated or {point: fmean(own) for point, own in losses.items()})


def is_inside(ladders: Sequence[Ladder], losses: Mapping[Point, float]) -> bool:
    """Return whether the best point is finite, and no neighbour of it is untried."""
    return next_point(ladders, losses) is None and math.isfinite(min(losses.values(), default=math.inf))


def _neighbours(ladders: Sequence[Ladder], point: Point) -> Iterator[Point]:
    """Yield the points that are one rung away on one ladder, the lower one first."""
    for i, ladder in enumerate(ladders):
        for step in (-1, 1):
            if ladder.has(point[i] + step):
                yield (*point[:i], point[i] + step, *point[i + 1 :])
