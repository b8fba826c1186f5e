"""Hyperparameters by step: the schedules of momentum and of weight decay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_muon import Muon, MuonConfig
from hf_muon.optimizer.step_rules import hyperparameters
from hf_muon.rules import registry
from tests.optimizer.cases import both_gradients, both_halves, gradients, parameters, run
from tests.rules.slow_rules import DecaySchedule

SHAPES = [(12, 20), (7, 9)]
STEPS = 8


def momentum_of(steps, **options):
    muon = Muon(parameters(SHAPES), **options)
    return [hyperparameters(muon.param_groups[0], number)["momentum"] for number in range(1, steps + 1)]


def test_momentum_rises_and_falls_between_the_ends():
    options = {"momentum_warmup": 4, "momentum_cooldown": 2, "training_steps": 8}
    assert momentum_of(9, **options) == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95, 0.95, 0.95, 0.9, 0.85])
    # A training that is shorter than both of them.
    assert momentum_of(3, momentum_warmup=4, momentum_cooldown=4, training_steps=3) == pytest.approx(
        [0.85, 0.875, 0.875]
    )


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match=r"momentum=0\.8 is below 0\.85"):
        Muon(parameters(SHAPES), momentum=0.8, momentum_warmup=3)
    optimizer, params = both_halves(momentum_cooldown=3)
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match=r"momentum_cooldown=3 counts from the end .* set training_steps"):
        run(optimizer, params, both_gradients(1))
    assert all(map(torch.equal, before, params))
    assert not optimizer.state
    with pytest.raises(ValueError, match="training_steps=0 is not valid"):
        MuonConfig(training_steps=0)


def test_this_runs_number_of_steps_holds_on_resume():
    optimizer, params = both_halves(momentum_cooldown=3, training_steps=6)
    run(optimizer, params, both_gradients(2))
    other, _ = both_halves(momentum_cooldown=3, training_steps=20)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["training_steps"] for group in other.param_groups] == [20, 20]
    unknown, _ = both_halves(momentum_cooldown=3)
    unknown.load_state_dict(optimizer.state_dict())
    assert [group["training_steps"] for group in unknown.param_groups] == [None, None]


def factor(step):
    return (step + 1) / 3 if step < 3 else 1 - (step - 2) / STEPS


@pytest.mark.parametrize("mode", ["decoupled", "cautious"])
def test_weight_decay_follows_the_rate(mode):
    start, grads = parameters(SHAPES), gradients(SHAPES, STEPS)
    slow = DecaySchedule(start, lr=0.02, weight_decay=0.5)
    if mode == "cautious":
        slow.decay = lambda weight, direction: torch.where(weight * direction >= 0, weight, 0)
    weights = {}
    for schedule in ("lr", "constant"):
        params = parameters(SHAPES)
        options = {"weight_decay": 0.5, "weight_decay_schedule": schedule, "weight_decay_mode": mode}
        optimizer = Muon(params, lr=0.02, ns_dtype="fp32", **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        for step in grads:
            run(optimizer, params, [step])
            scheduler.step()
        weights[schedule] = params
    for step, step_grads in enumerate(grads):
        slow.lr = 0.02 * factor(step)
        slow.step(step_grads)

    def error(params):
        pairs = zip(params, slow.weights, start, strict=True)
        return max(float((w.detach().double() - s).norm() / (s - x.detach()).norm()) for w, s, x in pairs)

    assert error(weights["lr"]) < 1e-4
    assert error(weights["constant"]) > 1e-3


def test_weight_decay_of_adamw_groups_follows_the_rate():
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(2))
    muon = Muon(
        [{"params": [ours], "use_muon": False}], lr=0.1, weight_decay=0.5, weight_decay_schedule="lr", adamw_eps=1e-8
    )
    adamw = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.5)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in (muon, adamw)]
    for step in range(STEPS):
        adamw.param_groups[0]["weight_decay"] = 0.5 * factor(step)
        for optimizer, param, scheduler in zip((muon, adamw), (ours, theirs), schedulers, strict=True):
            param.grad = torch.cos(torch.arange(40.0) * (step + 1))
            optimizer.step()
            scheduler.step()
    assert (ours - theirs).abs().max() < 1e-6


def test_peaks_of_schedulers():
    def decay(**keys):
        group = {**Muon(parameters(SHAPES), weight_decay=0.4, weight_decay_schedule="lr").param_groups[0], **keys}
        return hyperparameters(group, 1)["weight_decay"]

    assert decay(lr=0.5) == 0.4  # without a scheduler
    assert decay(lr=0.5, initial_lr=1.0) == pytest.approx(0.2)
    assert decay(lr=0.5, initial_lr=0.04, max_lr=1.0) == pytest.approx(0.2)  # OneCycleLR
    assert decay(lr=0.0, initial_lr=0.0) == 0.4
    assert decay(lr=torch.tensor(0.5), initial_lr=torch.tensor(1.0)) == pytest.approx(0.2)
    assert decay(lr=-1e-18, initial_lr=1.0) == 0.0


def test_rules_that_are_off_change_nothing():
    group = Muon(parameters(SHAPES)).param_groups[0]
    assert registry.rules_of(group) == []
