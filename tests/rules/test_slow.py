"""Each rule against a slow loop written from its paper, in float64, over random shapes."""

from __future__ import annotations

import pytest
import torch

from hf_muon import Muon
from tests.optimizer.cases import gradients, parameters, run
from tests.rules.settings import SETTINGS
from tests.rules.slow import relative
from tests.rules.slow_rules import SLOW

LR, DECAY, STEPS = 0.02, 0.5, 10


def shapes_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, 40, (2,), generator=generator).tolist()) for _ in range(6)]


@pytest.mark.parametrize("name", SETTINGS)
def test_ten_steps_are_those_of_the_paper(name):
    for seed in range(3):
        shapes = shapes_of(seed)
        start, grads = parameters(shapes, seed=seed), gradients(shapes, STEPS, seed=seed + 9)
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
    start, grads = parameters(list(texts.values())), gradients(list(texts.values()), STEPS)

    def matrices(q):
        stack, (a, b) = q[1], (q[3][:, ::2].T, q[3][:, 1::2].T)
        return [q[0][:8], q[0][8:14], q[0][14:], *stack, q[2].T, a, b]

    singles = [torch.nn.Parameter(m.detach().clone()) for m in matrices(start)]
    run(
        Muon(singles, lr=LR, weight_decay=DECAY, ns_dtype="fp32", **SETTINGS[name]),
        singles,
        [matrices(g) for g in grads],
    )
    weights = parameters(list(texts.values()))
    group = {"params": weights, "views": list(texts)}
    run(Muon([group], lr=LR, weight_decay=DECAY, ns_dtype="fp32", **SETTINGS[name]), weights, grads)
    for mine, single in zip(matrices([w.detach() for w in weights]), singles, strict=True):
        assert (mine - single).abs().max() < 1e-5
