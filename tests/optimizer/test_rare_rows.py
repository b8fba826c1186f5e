"""Rows of an embedding that seldom have a gradient, with AdamW's moments in int8: how far they may be from fp32.

Every bound is that of the codes: a rounding moves a moment by less than the distance to the next level, and the decay
of the average moves what was wrong before.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.math.codes import BLOCK
from hf_muon.math.moments import MOMENTS, decoded

PERIODS = (50, 7, 1, 151, 0)  # steps between two gradients of each row; 0 for never
STEPS, LR, EPS = 151, 1e-3, 1e-8
DECAY = {"exp_avg": 0.9, "exp_avg_sq": 0.95}
FP32 = 1e-5  # rounding of fp32, over all steps


def gradients(width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        size = 0.5 + 1.5 * torch.rand(len(PERIODS), width, generator=generator)
        sign = torch.randint(2, size.shape, generator=generator) * 2 - 1
        has_gradient = torch.tensor([bool(period) and step % period == 0 for period in PERIODS])
        yield size * sign * has_gradient.unsqueeze(1), has_gradient


def optimizer_of(width, **options):
    param = nn.Parameter(torch.zeros(len(PERIODS), width))
    betas = tuple(DECAY.values())
    group = {"params": [param], "use_muon": False, "adamw_betas": betas, "adamw_eps": EPS}
    return param, Muon([group], lr=LR, weight_decay=0.0, **options)


def to_the_next_level(state, key):
    """Return the distance from what each code stands for to the level above, which is that to the one below or more."""
    _, code = MOMENTS[key]
    codes, scales = state[key].double().abs(), state[MOMENTS[key].scale].double()
    scales = scales.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    return ((codes + 1) ** code.power - codes**code.power) / code.largest**code.power * scales


def updates(first, second, step):
    first, second = (m / (1 - beta**step) for m, beta in zip((first, second), DECAY.values(), strict=True))
    return first / (second.sqrt() + EPS)


@pytest.mark.parametrize("width", [64, 192, 100])
def test_rows_are_as_near_to_fp32_as_their_codes(width):
    """Take steps in most of which a row has no gradient: those add no error to its moments."""
    (exact, reference), (param, optimizer) = optimizer_of(width), optimizer_of(width, adamw_state_dtype="int8")
    errors = {key: torch.zeros(exact.shape, dtype=torch.float64) for key in DECAY}
    error, path = (torch.zeros(exact.shape, dtype=torch.float64) for _ in range(2))
    for step, (grad, has_gradient) in enumerate(gradients(width), 1):
        exact.grad, param.grad = grad.clone(), grad.clone()
        before = {key: value.clone() for key, value in optimizer.state[param].items()}
        reference.step()
        optimizer.step()
        stored, expected = optimizer.state[param], reference.state[exact]
        for key, beta in DECAY.items():
            if before:
                assert torch.equal(stored[key][~has_gradient], before[key][~has_gradient])
            rounding = to_the_next_level(stored, key) * has_gradient.unsqueeze(1)
            errors[key] = beta * errors[key] + rounding
            assert ((decoded(stored, key) - expected[key]).abs() <= errors[key] + FP32 * expected[key].abs()).all()
        first, second = (expected[key].double() for key in DECAY)
        apart = torch.zeros_like(error)
        for up in (1, -1):
            least = (second - up * errors["exp_avg_sq"]).clamp_min(0)
            for away in (1, -1):
                corner = updates(first + away * errors["exp_avg"], least, step)
                apart = apart.maximum((corner - updates(first, second, step)).abs())
        error += LR * apart
        path += LR * updates(first, second, step).abs()
        assert ((param - exact).abs() <= error + FP32 * path).all()
    rare = [row for row, period in enumerate(PERIODS) if period >= 50]
    assert (error <= 0.05 * path)[rare].all(), "or the bounds say little"
    assert not param[PERIODS.index(0)].any()


@pytest.mark.parametrize("ratio", [1e-1, 1e-3, 1e-4, 1e-6, 1e-12])
def test_small_elements_of_a_rare_row_are_bounded(ratio):
    """Let one element of a block have nearly all of its gradient, every 50th step: the others move a few times as far.

    Without rounding all elements move alike. Rounded, the first moment of a small one is at most the next level, and
    the root of the second at least the level below, or the first one.
    """
    param, optimizer = optimizer_of(64, adamw_state_dtype="int8")
    grad = torch.full(param.shape, ratio)
    grad[:, 5] = 1.0
    above, below = math.floor(127 * ratio**0.5) + 1, max(1, math.floor(255 * ratio**0.5))
    bound = (above / 127) ** 2 / (below / 255) ** 2
    for step in range(101):
        param.grad = grad * (step % 50 == 0)
        before = param.detach().clone()
        optimizer.step()
        moved = (param - before).abs()
        assert (moved <= 1.02 * bound * moved[:, 5:6]).all()  # 0.9**50 of the rounding before is left
        assert optimizer.state[param]["exp_avg_sq"].all()
