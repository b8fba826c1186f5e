"""The search for a side's best settings, one rule for all sides: which point to try next, from the losses so far.

A side tunes one setting or several, each on a ladder: a start times powers of a factor, which has no end, or a list of
choices, which has. A point is a rung on each ladder. The search begins at the starts and asks for the neighbours of the
best point, one ladder after another, until both neighbours on every ladder are worse. So a grid extends itself while
its best point is at an edge, and ends with the best inside, unless a list of choices ends there. Of many points that
are tried once, the best one is lucky, too: the leading ones are repeated with other seeds, and their means decide. If
another point wins then, its neighbours are tried, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
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

    def ends_at(self, rung: int) -> bool:
        """Return whether a list of several choices ends at a rung."""
        return len(self.choices) > 1 and not (self.has(rung - 1) and self.has(rung + 1))

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
    return untried_neighbour(ladders, losses, best)


def scores(losses: Mapping[Point, Sequence[float]]) -> dict[Point, float]:
    """Return how far each point lies above the one whose first loss is lowest, in the mean of the seeds that both have.

    With plain means, points with more seeds than others would win or lose because of the seeds.

    Args:
        losses: of each point, with one seed after another, the same seeds for all; not empty.

    Returns:
        The scores. A point that diverged with one seed has an infinite one.
    """
    anchor = losses[_anchor(losses)]
    if not math.isfinite(anchor[0]):
        return {point: own[0] for point, own in losses.items()}
    result = {}
    for point, own in losses.items():
        pairs = [(one, other) for one, other in zip(own, anchor, strict=False) if math.isfinite(other)]
        finite = all(map(math.isfinite, own))
        result[point] = fmean(one - other for one, other in pairs) if finite else math.inf
    return result


def _anchor(losses: Mapping[Point, Sequence[float]]) -> Point:
    """Return the point that scores are relative to."""
    return min(losses, key=lambda point: (losses[point][0], point))


def point_to_repeat(losses: Mapping[Point, Sequence[float]]) -> Point:
    """Return the point to try with another seed: of those that lead, the one with the fewest trials.

    The point that scores are relative to comes first, since a seed says nothing without it.

    Args:
        losses: of each point, with one seed after another; not empty.
    """
    by_point = scores(losses)
    leading = sorted(by_point, key=lambda point: (by_point[point], point))[:_LEADING]
    return min([_anchor(losses), *leading], key=lambda point: len(losses[point]))


def best_of_repeated(losses: Mapping[Point, Sequence[float]]) -> Point | None:
    """Return the point with the lowest score, of those that were repeated if any was."""
    if not losses:
        return None
    by_point = scores(losses)
    return best_point({point: by_point[point] for point, own in losses.items() if len(own) > 1} or by_point)


def untried_neighbour(ladders: Sequence[Ladder], tried: Collection[Point], point: Point) -> Point | None:
    """Return the first neighbour of a point that was not tried; None if there is none."""
    return next((one for one in _neighbours(ladders, point) if one not in tried), None)


def vertex(ladders: Sequence[Ladder], losses: Mapping[Point, Sequence[float]], best: Point) -> float | None:
    """Return the first setting at the vertex of the parabola through a point and its neighbours on the first ladder.

    Args:
        ladders: the first has a factor.
        losses: of each point, with one seed after another.
        best: the point in the middle.

    Returns:
        The setting, rounded to three digits, between the neighbours; None where a neighbour is missing or has
        diverged, or the point is not lower than both.
    """
    ladder = ladders[0]
    sides = [losses.get((best[0] + step, *best[1:])) for step in (-1, 1)]
    if ladder.choices or not all(sides):
        return None
    low, high = (fmean(one - other for one, other in zip(own or (), losses[best], strict=False)) for own in sides)
    if not (math.isfinite(low) and math.isfinite(high) and min(low, high) >= 0 < low + high):
        return None
    rung = best[0] + (low - high) / (2 * (low + high))
    return float(f"{float(ladder.start) * ladder.factor**rung:.3g}")


def _neighbours(ladders: Sequence[Ladder], point: Point) -> Iterator[Point]:
    """Yield the points that are one rung away on one ladder, the lower one first."""
    for i, ladder in enumerate(ladders):
        for step in (-1, 1):
            if ladder.has(point[i] + step):
                yield (*point[:i], point[i] + step, *point[i + 1 :])
