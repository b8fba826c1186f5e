"""examples/rules against loops in float64, one matrix at a time, as their sources write them."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon import Muon
from hf_muon.math.coefficients import resolve
from tests.optimizer.cases import gradients, parameters, run
from tests.rules import others
from tests.support.reference import newton_schulz_on_singular_values

LR, STEPS = 0.02, 6
SHAPES = [(14, 5), (6, 17), (9, 9)]
OPTIONS = {"bimaxwell": {"bimaxwell": 4}, "sinkhorn": {"sinkhorn": True}}


@pytest.fixture(autouse=True)
def registered():
    with others.registered():
        yield


def orthogonalized(matrix):
    return newton_schulz_on_singular_values(matrix, resolve("polar_express", 5))


def balanced_by_sinkhorn(update):
    norms = update.norm(dim=1)
    update = torch.stack(
        [row if norm > 1e-3 * norms.mean() else 0 * row for row, norm in zip(update, norms, strict=True)]
    )
    for turn in range(11):
        update = torch.nn.functional.normalize(update, dim=1 - turn % 2)
    return update


def slow(name, weight, grads):
    """Return a weight after all steps, in float64."""
    weight, fast, late = weight.detach().double(), 0.0, 0.0
    for step, grad in enumerate(grads, 1):
        grad = grad.double()
        decays = (0.85, 0.98) if "bimaxwell" in name and step >= 4 else (0.95, 0.95)
        fast, late = (decay * m + (1 - decay) * grad for decay, m in zip(decays, (fast, late), strict=True))
        share = 0.4385 if "bimaxwell" in name else 1.0
        update = 0.05 * grad + 0.95 * (share * fast + (1 - share) * late)
        move = 0.2 * math.sqrt(max(weight.shape))
        if name == "sinkhorn":
            direction, move = balanced_by_sinkhorn(update), 0.18 * math.sqrt(weight.size(1))
        else:
            direction = orthogonalized(update)
        weight = weight - LR * move * direction
    return weight


@pytest.mark.promise("own-rule")
@pytest.mark.parametrize("name", OPTIONS)
def test_six_steps_are_those_of_the_source(name):
    weights, grads = parameters(SHAPES), gradients(SHAPES, STEPS)
    for by_step in grads:
        by_step[0][2] *= 1e-5  # a row that gradients hardly reach
    start = [weight.detach().clone() for weight in weights]
    run(Muon(weights, lr=LR, weight_decay=0.0, ns_dtype="fp32", **OPTIONS[name]), weights, grads)
    for i, (weight, first) in enumerate(zip(weights, start, strict=True)):
        expected = slow(name, first, [by_step[i] for by_step in grads])
        assert (weight - expected).norm() < 1e-4 * (expected - first).norm()
