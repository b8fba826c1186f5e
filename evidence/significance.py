"""Means, spreads, and Welch's test, in a few lines of the standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev, variance
from typing import NamedTuple

LEVEL = 0.01
"""A difference counts as shown below this probability."""


class Welch(NamedTuple):
    """Welch's t-test of two means.

    Attributes:
        difference: the first mean minus the second.
        p: two-sided probability of a difference this large or larger if there were none; NaN with one value on a side.
    """

    difference: float
    p: float


def welch(a: Sequence[float], b: Sequence[float]) -> Welch:
    """Compare the means of two samples whose variances may differ (Welch 1947)."""
    difference = fmean(a) - fmean(b)
    if min(len(a), len(b)) < 2:
        return Welch(difference, math.nan)
    of_a, of_b = variance(a) / len(a), variance(b) / len(b)
    if of_a + of_b == 0:
        return Welch(difference, 1.0 if difference == 0 else 0.0)
    t = difference / math.sqrt(of_a + of_b)
    freedom = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    return Welch(difference, student_tails(t, freedom))


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


def spread(values: Sequence[float]) -> str:
    """Return mean, standard deviation and number of values as text."""
    deviation = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{fmean(values):.4f}{deviation} ({len(values)})"


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
