"""All pairs of rules: each step of a model is that of both papers."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from hf_muon import build_optimizer
from tests.rules.settings import OF_MODELS
from tests.rules.slow import relative
from tests.rules.slow_model import gradients, make, slow_model

LR, DECAY, STEPS = 0.02, 0.5, 10
PAIRS = [
    pair
    for pair in itertools.combinations(OF_MODELS, 2)
    if not OF_MODELS[pair[0]].keys() & OF_MODELS[pair[1]].keys()  # else one option would have two values
]


def factor(step):
    return (step + 1) / 3 if step < 3 else 1 - (step - 2) / STEPS


def batch(step):
    return torch.randint(20, (1, 5), generator=torch.Generator().manual_seed(step))


@functools.cache
def slow_run(*names):
    model = make()
    slow = slow_model(names, model, lr=LR, weight_decay=DECAY)
    for step, grads in enumerate(gradients(model, STEPS)):
        slow.lr = LR * factor(step)
        slow.forward(batch(step))
        slow.step(grads)
    return slow


def fast_weights(*names):
    model = make()
    options = {key: value for name in names for key, value in OF_MODELS[name].items()}
    optimizer = build_optimizer(model, lr=LR, weight_decay=DECAY, ns_dtype="fp32", **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    params = [param for param in model.parameters() if param.requires_grad]
    for step, grads in enumerate(gradients(model, STEPS)):
        if "qk_clip" in names:
            model(input_ids=batch(step))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        scheduler.step()
    return params


START = [param for param in make().parameters() if param.requires_grad]


@pytest.mark.parametrize("name", OF_MODELS)
def test_ten_steps_are_those_of_one_paper(name):
    assert relative(fast_weights(name), slow_run(name), START) < 1e-4
    assert relative(fast_weights(), slow_run(name), START) > 1e-2, "plain Muon is as near: the test shows nothing"


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_ten_steps_are_those_of_both_papers(pair):
    weights = fast_weights(*pair)
    assert relative(weights, slow_run(*pair), START) < 1e-4
    for name in pair:
        assert relative(weights, slow_run(name), START) > 1e-2, f"{name} alone is as near: the test shows nothing"


def test_ten_steps_are_those_of_all_papers():
    names = [name for name in OF_MODELS if name != "deepseek_v4"]  # other values of options that are there
    assert relative(fast_weights(*names), slow_run(*names), START) < 1e-4
