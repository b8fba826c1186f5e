"""All pairs of rules that can be said together: each step is that of both papers."""

from __future__ import annotations

import itertools

import pytest

from hf_muon import Muon
from tests.optimizer.cases import gradients, parameters, run
from tests.rules.settings import SETTINGS
from tests.rules.slow_rules import SLOW
from tests.rules.test_slow import DECAY, LR, STEPS, relative, shapes_of


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SETTINGS, 2)))
def test_ten_steps_are_those_of_both_papers(one, other):
    both = type("Both", (SLOW[one], SLOW[other]), {})  # they differ from plain Muon at different points
    shapes = shapes_of(0)
    start, grads = parameters(shapes), gradients(shapes, STEPS)
    slow = both(start, lr=LR, weight_decay=DECAY)
    for step in grads:
        slow.step(step)
    weights = parameters(shapes)
    options = SETTINGS[one] | SETTINGS[other]
    run(Muon(weights, lr=LR, weight_decay=DECAY, ns_dtype="fp32", **options), weights, grads)
    assert relative(weights, slow, start) < 1e-4
    for name in (one, other):
        alone = SLOW[name](start, lr=LR, weight_decay=DECAY)
        for step in grads:
            alone.step(step)
        assert relative(weights, alone, start) > 1e-3, f"{name} alone is as near: the test shows nothing"
