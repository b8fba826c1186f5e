"""Hyperparameters by step: the schedule of momentum."""

from __future__ import annotations

import pytest

from hf_muon import Muon
from hf_muon.optimizer.step_rules import hyperparameters
from hf_muon.rules import registry
from tests.optimizer.cases import parameters

SHAPES = [(12, 20), (7, 9)]


def momentum_of(steps, **options):
    muon = Muon(parameters(SHAPES), **options)
    return [hyperparameters(muon.param_groups[0], number)["momentum"] for number in range(1, steps + 1)]


def test_momentum_rises():
    assert momentum_of(6, momentum_warmup=4) == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95, 0.95])


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match=r"momentum=0\.8 is below 0\.85"):
        Muon(parameters(SHAPES), momentum=0.8, momentum_warmup=3)


def test_rules_that_are_off_change_nothing():
    group = Muon(parameters(SHAPES)).param_groups[0]
    assert registry.rules_of(group) == []
