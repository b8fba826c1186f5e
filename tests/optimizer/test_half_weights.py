"""bf16 and fp16 weights under both algorithms, against fp32: movement, means, and the warning of lost updates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_muon import Muon
from tests.optimizer.cases import equal, normal, run

HALF = (torch.bfloat16, torch.float16)
BOTH = pytest.mark.parametrize("use_muon", [True, False], ids=["muon", "adamw"])


def moved(start, grads, dtype, use_muon, **options):
    """Return how far a weight moves from `start`, in fp32."""
    param = nn.Parameter(start.to(dtype))
    before = param.detach().float().clone()
    optimizer = Muon([{"params": [param], "use_muon": use_muon}], ns_dtype="fp32", **options)
    run(optimizer, [param], [[grad.to(dtype)] for grad in grads])
    return param.detach().float() - before


@BOTH
@pytest.mark.parametrize("lr", [1e-5, 2e-5, 2e-4])
def test_small_updates_are_not_lost(use_muon, lr):
    """Take 1,000 steps along a constant gradient: bf16 weights end where fp32 weights do."""
    start = normal(64, 256, scale=0.02).bfloat16().float()
    grads = [normal(64, 256, seed=1).bfloat16().float()] * 1000

    def progress(steps, **options):
        exact = moved(start, grads[:steps], torch.float32, use_muon, lr=lr)
        rounded = moved(start, grads[:steps], torch.bfloat16, use_muon, lr=lr, **options)
        return float((rounded * exact).sum() / exact.square().sum())

    # Each element ends within a few random roundings of a unit in the last place; their projection is their mean.
    assert progress(1000) == pytest.approx(1, abs=0.01)
    if lr < 1e-4:
        assert progress(100, weight_rounding="nearest") < 0.5, "what rounding to nearest loses"


@BOTH
@pytest.mark.parametrize("dtype", HALF)
def test_the_mean_over_seeds_is_the_exact_step(use_muon, dtype):
    """Take one step from many weights: the mean error is that of unbiased rounding."""
    errors, variances = [], []
    for seed in range(50):
        start = normal(16, 16, seed=seed, scale=0.02).to(dtype).float()
        grads = [normal(16, 16, seed=1000 + seed).to(dtype).float()]
        exact = start + moved(start, grads, torch.float32, use_muon, lr=1e-4)
        rounded = start + moved(start, grads, dtype, use_muon, lr=1e-4)
        errors.append((rounded - exact).double())
        unit = (torch.nextafter(rounded.to(dtype), torch.tensor(math.inf, dtype=dtype)).float() - rounded).double()
        variances.append(unit.square() / 4)  # at most
    errors, variances = torch.stack(errors), torch.stack(variances)
    assert abs(float(errors.sum())) < 5 * math.sqrt(float(variances.sum()))
    assert float(errors.abs().max()) > 0


def test_norm_weights_do_not_move_in_lockstep():
    grad = 1 + normal(4096).abs()  # of one sign: all weights go down
    change = moved(torch.ones(4096), [grad], torch.bfloat16, use_muon=False, lr=1e-3)
    # A step of 1e-3, where the values below one lie 2**-8 apart.
    assert float((change < 0).double().mean()) == pytest.approx(1e-3 * 2**8, abs=0.03)


@BOTH
def test_fp32_weights_are_not_rounded(use_muon):
    grads = [normal(20, 24, seed=k) for k in range(4)]
    options = [{"weight_rounding": rounding} for rounding in ("auto", "nearest", "stochastic")]
    runs = [moved(normal(20, 24), grads, torch.float32, use_muon, **each) for each in options]
    assert equal(runs[1:], runs[:1] * 2)


LOST = "[weights-cannot-move]"


def log_of_steps(caplog, dtype=torch.bfloat16, lrs=(2e-5,), **options):
    """Return the log of steps of both algorithms at these rates."""
    params = [nn.Parameter(normal(64, 64, seed=seed, scale=0.02).to(dtype)) for seed in range(2)]
    groups = [{"params": [param], "use_muon": muon} for param, muon in zip(params, (True, False), strict=True)]
    optimizer = Muon(groups, lr=max(lrs), ns_dtype="fp32", **options)
    for k, lr in enumerate(lrs):
        for group in optimizer.param_groups:
            group["initial_lr"], group["lr"] = max(lrs), lr
        run(optimizer, params, [[normal(64, 64, seed=k).to(dtype)] * 2])
    return caplog.text


def test_the_warning_says_once_what_share_is_lost(caplog):
    text = log_of_steps(caplog, weight_rounding="nearest", lrs=(2e-5,) * 3)
    assert text.count(LOST) == 1
    assert "learning rate of 2e-05, 8" in text  # 80 to 89 %
    assert "bfloat16" in text


@pytest.mark.parametrize(
    "options",
    [
        {"weight_rounding": "auto"},
        {"weight_rounding": "nearest", "dtype": torch.float32},
        {"weight_rounding": "nearest", "lrs": (0.0, 1e-5, 1e-2)},  # a warmup, at whose end nearly all weights move
    ],
)
def test_no_warning_where_nothing_is_lost(caplog, options):
    assert LOST not in log_of_steps(caplog, **options)
