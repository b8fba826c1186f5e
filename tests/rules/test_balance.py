"""`balance`: what it promises of norms, and with other rules; `test_papers` has its steps."""

from __future__ import annotations

import pytest
import torch

from hf_muon import Muon
from hf_muon.rules.balance import balanced
from tests.optimizer.cases import gradients, parameters, run
from tests.rules import others
from tests.support.reference import polar_factor

DIRECTIONS = {"balance": "directions"}


def spread(matrix, side):
    norms = matrix.norm(dim=side)
    return float(norms.std() / norms.mean())


@pytest.mark.parametrize("shape", [(80, 16), (16, 80)])
def test_directions_are_orthogonal_with_nearly_equal_norms_of_the_long_side(shape):
    update = torch.randn(shape).double() * torch.rand(shape[0], 1).double() ** 3 * torch.rand(shape[1]).double() ** 3
    direction = balanced(update[None], polar_factor, {}, DIRECTIONS, 1)[0]
    side = 1 if shape[0] > shape[1] else 0
    assert torch.allclose(torch.linalg.svdvals(direction), torch.ones(16).double())
    assert spread(direction, side) < 0.25 * spread(polar_factor(update), side)


@pytest.mark.parametrize("balance", ["updates", "directions"])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_that_gradients_do_not_reach_stay_small_and_scales_do_not_matter(balance, transposed):
    """Rows of zeros, and matrices of them, stay where they are; a dead row's rest does not grow to the others' size."""
    updates = torch.randn(3, 40, 8)
    updates[0, 7], updates[1], updates[2, 7] = 0, 0, 1e-28 * updates[2, 7]
    updates = updates.mT if transposed else updates

    def directions(scale):
        return balanced(scale * updates, lambda x: polar_factor(x).float(), {}, {"balance": balance}, 1)

    results = directions(1.0)
    rows = results.mT if transposed else results
    assert rows.isfinite().all()
    assert rows[0, 7].norm() == rows[1].norm() == 0
    if not transposed or balance == "directions":
        assert rows[2, 7].norm() < 1e-20
        assert rows[2, :7].norm(dim=1).min() > 0.1
    for scale in (2.0**-80, 2.0**60):
        assert torch.equal(directions(scale)[0], results[0])


@pytest.mark.parametrize("balance", ["updates", "directions"])
def test_weights_in_float64_and_gradients_of_zeros_are_stepped(balance):
    weights = parameters([(14, 5), (6, 17)], dtype=torch.float64)
    before = [weight.detach().clone() for weight in weights]
    optimizer = Muon(weights, balance=balance, normalize="rows")
    run(optimizer, weights, [[torch.zeros_like(weight) for weight in weights]])
    assert all(map(torch.equal, weights, before))
    run(optimizer, weights, gradients([(14, 5), (6, 17)], 2, dtype=torch.float64))
    for weight, first in zip(weights, before, strict=True):
        assert weight.isfinite().all()
        assert ((weight - first).norm(dim=1) > 0).all()


@pytest.mark.parametrize("name", ["normalize", "their_normalize"])
def test_state_moves_once_where_another_rule_orthogonalizes_twice(name):
    """A rule with state normalizes balanced directions, whenever it was registered."""
    shapes = [(14, 5), (6, 17), (9, 9)]
    weights, (grads,) = parameters(shapes), gradients(shapes, 1)
    with others.registered():
        optimizer = Muon(weights, ns_dtype="fp32", **DIRECTIONS, **{name: "rows" if name == "normalize" else True})
        run(optimizer, weights, [grads])
    key = "row_second_moment" if name == "normalize" else "their_moment"
    for weight, grad in zip(weights, grads, strict=True):
        direction = balanced(grad[None].double(), polar_factor, {}, DIRECTIONS, 1)[0]
        assert torch.allclose(optimizer.state[weight][key].double(), 0.05 * direction.square().mean(1), rtol=0.3)
