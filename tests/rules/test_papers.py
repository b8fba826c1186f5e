"""Each rule, and each pair of rules, against slow loops written from their papers, in float64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from hf_muon import Muon, build_optimizer
from tests.optimizer.cases import gradients as gradients_of
from tests.optimizer.cases import parameters, run
from tests.rules.settings import OF_MODELS, SETTINGS
from tests.rules.slow import relative
from tests.rules.slow_model import gradients, make, slow_model
from tests.rules.slow_rules import SLOW

LR, DECAY, STEPS = 0.02, 0.5, 10


def shapes_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, 40, (2,), generator=generator).tolist()) for _ in range(6)]


@pytest.mark.parametrize("name", SETTINGS)
def test_matrices_of_random_shapes(name):
    for seed in range(3):
        shapes = shapes_of(seed)
        start, grads = parameters(shapes, seed=seed), gradients_of(shapes, STEPS, seed=seed + 9)
        slow = SLOW[name](start, lr=LR, weight_decay=DECAY)
        for step in grads:
            slow.step(step)
        weights = parameters(shapes, seed=seed)
        run(Muon(weights, lr=LR, weight_decay=DECAY, ns_dtype="fp32", **SETTINGS[name]), weights, grads)
        assert relative(weights, slow, start) < 1e-4
        plain = parameters(shapes, seed=seed)
        run(Muon(plain, lr=LR, weight_decay=DECAY, ns_dtype="fp32"), plain, grads)
        assert relative(plain, slow, start) > 1e-3, "plain Muon is as near: the test shows nothing"


@pytest.mark.parametrize("name", SETTINGS)
def test_views_and_stacks_are_stepped_like_their_matrices(name):
    """The parts of a fused weight, and the matrices of a stack, have state of their own; rows are outputs."""
    texts = {"rows 8+6+4": (18, 10), "": (3, 7, 9), "transposed": (12, 7), "transposed, columns 5*(1+1)": (6, 10)}
    start, grads = parameters(list(texts.values())), gradients_of(list(texts.values()), STEPS)
    options = {"lr": LR, "weight_decay": DECAY, "ns_dtype": "fp32", **SETTINGS[name]}

    def matrices(q):
        stack, (a, b) = q[1], (q[3][:, ::2].T, q[3][:, 1::2].T)
        return [q[0][:8], q[0][8:14], q[0][14:], *stack, q[2].T, a, b]

    singles = [torch.nn.Parameter(m.detach().clone()) for m in matrices(start)]
    run(Muon(singles, **options), singles, [matrices(g) for g in grads])
    weights = parameters(list(texts.values()))
    run(Muon([{"params": weights, "views": list(texts)}], **options), weights, grads)
    for mine, single in zip(matrices([w.detach() for w in weights]), singles, strict=True):
        assert (mine - single).abs().max() < 1e-5


# --- a model: every rule and other option, and all pairs of them

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


@functools.cache
def start():
    return [param for param in make().parameters() if param.requires_grad]


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


@pytest.mark.promise("rules")
@pytest.mark.parametrize("name", OF_MODELS)
def test_ten_steps_are_those_of_one_paper(name):
    assert relative(fast_weights(name), slow_run(name), start()) < 1e-4
    assert relative(fast_weights(), slow_run(name), start()) > 1e-2, "plain Muon is as near: the test shows nothing"


# Those of which one depends on what the other does.
CLOSE = (
    "momentum_schedule-normalize|normalize-cautious|cautious-lr_scales|normalize-qk_clip|lr_scales-qk_clip|cautious-qk"
)


@pytest.mark.first_tier(CLOSE)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_ten_steps_are_those_of_both_papers(pair):
    weights = fast_weights(*pair)
    assert relative(weights, slow_run(*pair), start()) < 1e-4
    for name in pair:
        assert relative(weights, slow_run(name), start()) > 1e-2, f"{name} alone is as near: the test shows nothing"


def test_ten_steps_are_those_of_all_papers():
    names = [name for name in OF_MODELS if name != "deepseek_v4"]  # other values of options that are there
    assert relative(fast_weights(*names), slow_run(*names), start()) < 1e-4
