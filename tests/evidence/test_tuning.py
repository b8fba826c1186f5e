"""Searches find what trying every point finds."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest

from evidence.tuning import Ladder, best_point, finer_point, is_inside, next_point


def search(ladders, loss):
    """Return the points that a search asks for, with their losses."""
    losses = {}
    while (point := next_point(ladders, losses)) is not None:
        losses[point] = loss(point)
        assert len(losses) < 100
    return losses


@pytest.mark.parametrize("goal", list(itertools.product((-5, 0, 7), (-3, 0, 2))))
def test_the_best_point_of_two_ladders_is_found_wherever_it_is(goal):
    ladders = [Ladder(1e-3, 2), Ladder(1, 3, times="learning_rate")]
    losses = search(ladders, lambda point: (point[0] - goal[0]) ** 2 + (point[1] - goal[1]) ** 2)
    best = best_point(losses)
    assert best == goal
    assert is_inside(ladders, losses)
    for i, step in itertools.product(range(2), (-1, 1)):
        assert tuple(rung + step * (k == i) for k, rung in enumerate(best)) in losses


def test_choices_end_where_the_list_ends():
    ladders = [Ladder(0.95, choices=(0.9, 0.95, 0.99))]
    losses = search(ladders, lambda point: -float(point[0]))
    assert [ladders[0].value(point[0]) for point in losses] == [0.95, 0.9, 0.99]
    assert is_inside(ladders, losses)


def test_diverged_trials_lead_to_lower_rates():
    ladders = [Ladder(1.0, 10)]
    losses = search(ladders, lambda point: math.inf if point[0] > -3 else (float(point[0]) + 5) ** 2)
    assert ladders[0].value(best_point(losses)[0]) == pytest.approx(1e-5)


def test_trials_that_are_left_go_between_the_best_and_its_neighbours():
    ladders = [Ladder(1.0, 4), Ladder("b", choices=("a", "b"))]
    losses = search(ladders, lambda point: abs(float(point[0]) - 0.4) + float(point[1]) ** 2)
    points = []
    for _ in range(3):
        points.append(finer_point(ladders, losses))
        losses[points[-1]] = abs(float(points[-1][0]) - 0.4)
    assert points == [(Fraction(-1, 2), 0), (Fraction(1, 2), 0), (Fraction(-1, 4), 0)]
    assert [ladders[0].value(rung) for rung, _ in points] == [0.5, 2.0, 0.707]
    assert next_point(ladders, losses) is None
