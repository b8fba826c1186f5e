"""Searches find what trying every point finds."""

from __future__ import annotations

import itertools
import math

import pytest

from evidence.tuning import (
    Ladder,
    best_of_repeated,
    best_point,
    next_point,
    point_to_repeat,
    scores,
    untried_neighbour,
)


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
    assert untried_neighbour(ladders, losses, best) is None
    for i, step in itertools.product(range(2), (-1, 1)):
        assert tuple(rung + step * (k == i) for k, rung in enumerate(best)) in losses


def test_choices_end_where_the_list_ends_and_diverged_trials_lead_to_lower_rates():
    ladders = [Ladder(0.95, choices=(0.9, 0.95, 0.99))]
    losses = search(ladders, lambda point: -point[0])
    assert [ladders[0].value(point[0]) for point in losses] == [0.95, 0.9, 0.99]
    assert (ladders[0].ends_at(1), ladders[0].ends_at(0)) == (True, False)
    ladders = [Ladder(1.0, 10)]
    losses = search(ladders, lambda point: math.inf if point[0] > -3 else (point[0] + 5) ** 2)
    assert ladders[0].value(best_point(losses)[0]) == pytest.approx(1e-5)


def test_a_lucky_point_is_found_out():
    """Take one point whose first trial was better than its mean, and repeat what leads."""
    means = {(0,): 3.0, (1,): 2.0, (2,): 2.5, (3,): 4.0}
    losses = {point: [mean] for point, mean in means.items()}
    losses[2,] = [1.0]
    assert best_of_repeated(losses) == (2,)
    repeated = []
    for _ in range(5):
        repeated.append(point_to_repeat(losses))
        losses[repeated[-1]].append(means[repeated[-1]])
    assert repeated == [(2,), (1,), (0,), (2,), (1,)]
    assert best_of_repeated(losses) == (1,)
    diverged = {(0,): [math.inf], (1,): [3.0], (2,): [math.inf]}
    assert point_to_repeat(diverged) == best_of_repeated(diverged) == (1,)
    # A seed that is hard for all does not decide: the better point has one more, at which every loss is higher.
    losses = {(0,): [2.0, 3.0, 4.0], (1,): [2.05, 3.1], (2,): [2.5]}
    assert scores(losses) == pytest.approx({(0,): 0.0, (1,): 0.075, (2,): 0.5})
    assert best_of_repeated(losses) == (0,)
