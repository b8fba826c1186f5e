"""`balance: updates`: rows that gradients do not reach, and scales; `test_papers` has its steps."""

from __future__ import annotations

import torch

from hf_muon import Muon
from hf_muon.rules.balance import balanced
from tests.optimizer.cases import gradients, parameters, run
from tests.support.reference import polar_factor


def test_rows_that_gradients_do_not_reach_stay_small_and_scales_do_not_matter():
    """Rows of zeros, and matrices of them, stay where they are; a dead row's rest does not grow to the others' size."""
    updates = torch.randn(3, 40, 8)
    updates[0, 7], updates[1], updates[2, 7] = 0, 0, 1e-28 * updates[2, 7]

    def directions(scale, updates=updates):
        return balanced(scale * updates, lambda x: polar_factor(x).float(), {}, {}, 1)

    rows = directions(1.0)
    assert rows.isfinite().all()
    assert rows[0, 7].norm() == rows[1].norm() == 0
    assert rows[2, 7].norm() < 1e-20
    assert rows[2, :7].norm(dim=1).min() > 0.1
    wide = directions(1.0, updates.mT)
    assert wide.isfinite().all()
    assert wide.mT[0, 7].norm() == wide[1].norm() == 0
    for scale in (2.0**-80, 2.0**60):
        assert torch.equal(directions(scale)[0], rows[0])


def test_weights_in_float64_and_gradients_of_zeros_are_stepped():
    weights = parameters([(14, 5), (6, 17)], dtype=torch.float64)
    before = [weight.detach().clone() for weight in weights]
    optimizer = Muon(weights, balance="updates", normalize="rows")
    run(optimizer, weights, [[torch.zeros_like(weight) for weight in weights]])
    assert all(map(torch.equal, weights, before))
    run(optimizer, weights, gradients([(14, 5), (6, 17)], 2, dtype=torch.float64))
    for weight, first in zip(weights, before, strict=True):
        assert weight.isfinite().all()
        assert ((weight - first).norm(dim=1) > 0).all()
