"""Every rule, every other option that changes a step, and all pairs of them, against slow loops in float64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from hf_muon import build_optimizer
from tests.optimizer.cases import run
from tests.rules.settings import TRIPLES
from tests.rules.slow import Slow, gradients, make

LR, DECAY, STEPS = 0.02, 0.5, 10
OPTIONS = {
    "momentum_schedule": {"momentum_warmup": 2},
    "normalize": {"normalize": "rows"},
    "muoneq": {"balance": "updates"},
    "cautious": {"weight_decay_mode": "cautious"},
    "lr_scales": {"lr_scales": {r"layers\.0\.": 0.5, "embed|lora_B": 2.0}},
    "update_rms": {"update_rms": 0.3},
    "list": {"ns_coefficients": TRIPLES},
    "qk_clip": {"qk_clip": 1.0},
    "lora_b": {"lora": "muon", "adamw_patterns": "lora_A"},
}
# One option would have two values in the other pairs.
PAIRS = [(a, b) for a, b in itertools.combinations(OPTIONS, 2) if not OPTIONS[a].keys() & OPTIONS[b].keys()]
# Those of which one depends on what the other does.
CLOSE = "|".join(
    [
        *("momentum_schedule-normalize", "normalize-(muoneq|cautious)", "normalize-qk_clip"),
        *("cautious-lr_scales", "cautious-qk", "lr_scales-qk_clip"),
    ]
)


def options_of(names):
    return {key: value for name in names for key, value in OPTIONS[name].items()}


def factor(step):
    return (step + 1) / 3 if step < 3 else 1 - (step - 2) / STEPS


def batch(step):
    return torch.randint(20, (1, 5), generator=torch.Generator().manual_seed(step))


@functools.cache
def slow(*names):
    model = make()
    own = Slow(model, options_of(names))
    for step, grads in enumerate(gradients(model, STEPS)):
        own.step(batch(step), grads, LR * factor(step), DECAY)
    return own


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


@functools.cache
def fast(*names):
    model = make()
    optimizer = build_optimizer(model, lr=LR, weight_decay=DECAY, ns_dtype="fp32", **options_of(names))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step, grads in enumerate(gradients(model, STEPS)):
        if "qk_clip" in names:
            model(input_ids=batch(step))
        run(optimizer, trained(model), [grads])
        scheduler.step()
    return trained(model)


def assert_those_of(names, less):
    """Assert that steps are those of the slow loops, and not those of the slow loops with less."""
    start = trained(make())
    assert slow(*names).distance(fast(*names), start) < 1e-4
    for others in less:
        assert slow(*others).distance(fast(*names), start) > 1e-2, f"{others} are as near: the test shows nothing"


@pytest.mark.promise("rules")
@pytest.mark.parametrize("name", OPTIONS)
def test_ten_steps_are_those_of_one_paper(name):
    assert_those_of([name], [[]])


@pytest.mark.second_tier(CLOSE)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_ten_steps_are_those_of_both_papers(pair):
    assert_those_of(pair, [[name] for name in pair])


def test_ten_steps_are_those_of_all_papers():
    assert_those_of([*OPTIONS], [])
