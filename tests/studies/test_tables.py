"""Verdicts and tests of significance against known answers; `test_results.py` has the tables of the studies."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import pytest

from evidence.budgets import fewer_tokens
from evidence.conclusions import verdict
from evidence.significance import Difference, paired, smallest_shown, student_tails

# By mean, deviation, p and pairs.
VERDICTS = {
    (-0.5, 0.1, 0.001, 3): "lower loss",
    (0.5, 0.1, 0.001, 3): "higher loss",
    (-0.5, 0.1, 0.02, 3): "no difference shown",
    (-0.5, 0.1, 0.001, 2): "nothing yet: 2 seeds",
    (0.0, 0.1, 1.0, 3): "no difference shown",
    (0.0, 0.0, 1.0, 3): "equal",
}
FEWER = {
    (4.0, 3.0, 2.0): "4.00x",
    (4.5, 3.5, 2.5): "2.00x",
    (2.9, 2.8, 2.7): "more than 16.00x",
    (5.5, 4.5, 3.5): "0.50x",
    (6.0, 5.7, 5.5): "less than 0.06x",
    (5.0, 4.0, 3.0): "1.00x",
}


def test_verdicts_and_how_many_fewer_tokens():
    """Compare with losses that fall by 1 with each fourfold budget."""
    assert {found: verdict(Difference(*found)) for found in VERDICTS} == VERDICTS
    budgets = (1.0, 4.0, 16.0)
    theirs = dict(zip(budgets, (5.0, 4.0, 3.0), strict=True))
    assert {own: fewer_tokens(dict(zip(budgets, own, strict=True)), theirs) for own in FEWER} == FEWER


def test_tails_of_student_are_the_integral_of_its_density():
    for t, freedom in itertools.product((0.1, 1.0, 4.0), (1.5, 4, 30)):
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
        points = [t * i / 20_000 for i in range(20_001)]
        density = [scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in points]
        integral = sum((a + b) / 2 for a, b in itertools.pairwise(density)) * t / 20_000
        assert student_tails(t, freedom) == pytest.approx(1 - 2 * integral, abs=1e-8)
    assert student_tails(1.96, 1e6) == pytest.approx(2 * NormalDist().cdf(-1.96), abs=1e-6)
    # The smallest difference that would be shown: two degrees of freedom, where t = 9.925 leaves 1 % in the tails.
    assert smallest_shown(Difference(0.01, 0.1, 0.8, 3)) == pytest.approx(9.92484 * 0.1 / math.sqrt(3), rel=1e-5)


def test_pairs_of_a_worked_example():
    """Take Student's distribution with two degrees of freedom, whose tails are 1 - t / sqrt(t^2 + 2)."""
    a, b = {"1": 4.0, "2": 5.1, "3": 3.2, "4": 9.0}, {"3": 3.0, "2": 5.0, "1": 3.7, "5": 1.0}
    test = paired(a, b)
    assert (test.mean, test.deviation, test.pairs) == (pytest.approx(0.2), pytest.approx(0.1), 3)
    t = 0.2 / (0.1 / math.sqrt(3))
    assert test.p == pytest.approx(1 - t / math.sqrt(t**2 + 2))
    assert math.isnan(paired({"1": 1.0}, b).p)
    assert paired(b, b) == (0.0, 0.0, 1.0, 4)
    with pytest.raises(ValueError, match="no seed in common"):
        paired({"7": 1.0}, b)
