"""Means, spreads, and Student's test of pairs, in a few lines of the standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

LEVEL = 0.01
"""A difference counts as shown below this probability."""


class Difference(NamedTuple):
    """The mean difference of pairs, with Student's t-test.

    Attributes:
        mean: of the differences.
        deviation: their standard deviation; NaN for one pair.
        p: two-sided probability of a mean this far from zero or farther if sides did not differ; NaN for one pair.
        pairs: their number.
    """

    mean: float
    deviation: float
    p: float
    pairs: int

    def text(self) -> str:
        """Return the mean with its standard deviation."""
        return f"{self.mean:+.4f}" + (f" ± {self.deviation:.4f}" if self.pairs > 1 else "")


def paired(own: Mapping[str, float], reference: Mapping[str, float]) -> Difference:
    """Compare two sides seed by seed: with a seed they share the first weights and the order of the text.

    Args:
        own: the losses of a side by seed.
        reference: the reference's.

    Raises:
        ValueError: no seed is in both.
    """
    differences = [own[seed] - reference[seed] for seed in sorted(own.keys() & reference.keys())]
    if not differences:
        raise ValueError("the sides have no seed in common")
    mean, count = fmean(differences), len(differences)
    if count < 2:
        return Difference(mean, math.nan, math.nan, count)
    deviation = stdev(differences)
    if deviation == 0:
        return Difference(mean, 0.0, 1.0 if mean == 0 else 0.0, count)
    return Difference(mean, deviation, student_tails(mean / deviation * math.sqrt(count), count - 1), count)


def smallest_shown(test: Difference) -> float:
    """Return the mean difference from which on pairs with this deviation are significant at `LEVEL`."""
    low, high = 0.0, 1e6  # of Student's t
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tails(middle, test.pairs - 1) > LEVEL else (low, middle)
    return high * test.deviation / math.sqrt(test.pairs)


def student_tails(t: float, freedom: float) -> float:
    """Return the probability that Student's t is at least as far from zero as `t`."""
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges fast
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    fraction = 0.0
    for m in reversed(range(200)):
        even = (m + 1) * (b - m - 1) * x / ((a + 2 * m + 1) * (a + 2 * m + 2))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = odd / (1 + even / (1 + fraction))
    return front / (1 + fraction)


def spread(values: Sequence[float], *, sign: bool = False) -> str:
    """Return mean, standard deviation and number of values as text; with a sign for changes."""
    deviation = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{fmean(values):{'+' if sign else ''}.4f}{deviation} ({len(values)})"


def step_of(losses: Mapping[int, float], target: float) -> float | None:
    """Return the step at which a curve first reaches a loss, interpolated between its points; None if it does not."""
    before: tuple[int, float] | None = None
    for step, loss in sorted(losses.items()):
        if loss <= target:
            if before is None:
                return float(step)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = (step, loss)
    return None


def speed_up(curves: Sequence[Mapping[int, float]], reference: Sequence[Mapping[int, float]]) -> float | None:
    """Return how many times fewer steps a side takes to the reference's final loss.

    Where the side does not get there, the reference's steps to the side's own final loss are counted, and the result
    is below one.

    Args:
        curves: the side's losses by step, a mapping for each seed.
        reference: the reference's.
    """
    own, other = mean_curve(curves), mean_curve(reference)
    last, other_last = max(own), max(other)
    if (step := step_of(own, other[other_last])) is not None:
        return other_last / step
    step = step_of(other, own[last])
    return None if step is None else step / last


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean loss at the steps that all curves have."""
    steps = set.intersection(*(set(curve) for curve in curves))
    return {step: fmean(curve[step] for curve in curves) for step in sorted(steps)}
