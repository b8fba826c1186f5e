"""bf16 and fp16 weights under both algorithms, against fp32: movement, means and resume."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import nn

from hf_muon import Muon

HALF = (torch.bfloat16, torch.float16)
BOTH = pytest.mark.parametrize("use_muon", [True, False], ids=["muon", "adamw"])


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def optimizer_of(param, use_muon=True, **options):
    return Muon([{"params": [param], "use_muon": use_muon}], ns_dtype="fp32", **options)


def moved(start, grads, dtype, use_muon, **options):
    """Return how far a weight moves from `start`, in fp32."""
    param = nn.Parameter(start.to(dtype))
    before = param.detach().float().clone()
    optimizer = optimizer_of(param, use_muon, **options)
    for grad in grads:
        param.grad = grad.to(dtype)
        optimizer.step()
    return param.detach().float() - before


@BOTH
@pytest.mark.parametrize("lr", [1e-5, 2e-5, 2e-4])
def test_small_updates_are_not_lost(use_muon, lr):
    """Take 1,000 steps along a constant gradient: bf16 weights end where fp32 weights do."""
    start = normal(64, 256, scale=0.02).bfloat16().float()
    grads = [normal(64, 256, seed=1).bfloat16().float()] * 1000
    exact = moved(start, grads, torch.float32, use_muon, lr=lr)
    rounded = moved(start, grads, torch.bfloat16, use_muon, lr=lr)
    progress = float((rounded * exact).sum() / exact.square().sum())
    # Each element ends within a few random roundings of a unit in the last place; their projection is their mean.
    assert progress == pytest.approx(1, abs=0.01)
    nearest = moved(start, grads[:100], torch.bfloat16, use_muon, lr=lr, weight_rounding="nearest")
    exact = moved(start, grads[:100], torch.float32, use_muon, lr=lr)
    if lr < 1e-4:
        assert float((nearest * exact).sum() / exact.square().sum()) < 0.5, "what rounding to nearest loses"


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
    param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = optimizer_of(param, use_muon=False, lr=1e-3)
    for step in range(3):
        param.grad = (1 + normal(4096, seed=step).abs()).bfloat16()  # of one sign: all weights go down
        optimizer.step()
        shares = float((param < 1).double().mean())
        if step == 0:
            # A step of 1e-3, where the values below one lie 2**-8 apart.
            assert shares == pytest.approx(1e-3 * 2**8, abs=0.03)


@BOTH
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("adamw_state_dtype", ["auto", "bf16", "int8"])
def test_a_resumed_run_has_the_same_bits(use_muon, dtype, adamw_state_dtype):
    def run(steps, optimizer, param, start=0):
        for step in range(start, start + steps):
            param.grad = normal(20, 24, seed=step).to(dtype)
            optimizer.step()

    options = {"lr": 1e-4, "adamw_state_dtype": adamw_state_dtype}
    straight = nn.Parameter(normal(20, 24, scale=0.02).to(dtype))
    optimizer = optimizer_of(straight, use_muon, **options)
    run(3, optimizer, straight)
    resumed = nn.Parameter(straight.detach().clone())
    saved = copy.deepcopy(optimizer.state_dict())
    run(3, optimizer, straight, start=3)
    again = optimizer_of(resumed, use_muon, **options)
    again.load_state_dict(saved)
    run(3, again, resumed, start=3)
    assert torch.equal(straight, resumed)
    for key, value in optimizer.state[straight].items():
        assert torch.equal(value, again.state[resumed][key])


@BOTH
def test_fp32_weights_are_not_rounded(use_muon):
    grads = [normal(20, 24, seed=step) for step in range(4)]
    runs = [
        moved(normal(20, 24), grads, torch.float32, use_muon, weight_rounding=rounding)
        for rounding in ("auto", "nearest", "stochastic")
    ]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


class TestLostUpdates:
    """The warning that `weight_rounding=nearest` leaves most weights as they are."""

    @pytest.fixture
    def warnings(self, caplog):
        caplog.set_level(logging.WARNING)
        return lambda: [record.getMessage() for record in caplog.records if "cannot move" in record.getMessage()]

    def steps(self, dtype=torch.bfloat16, lrs=(2e-5,), **options):
        params = [nn.Parameter(normal(64, 64, seed=seed, scale=0.02).to(dtype)) for seed in range(2)]
        groups = [{"params": [param], "use_muon": muon} for param, muon in zip(params, (True, False), strict=True)]
        optimizer = Muon(groups, lr=max(lrs), ns_dtype="fp32", **options)
        for step, lr in enumerate(lrs):
            for group in optimizer.param_groups:
                group["initial_lr"], group["lr"] = max(lrs), lr
            for param in params:
                param.grad = normal(64, 64, seed=step).to(dtype)
            optimizer.step()

    def test_says_once_what_share_is_lost(self, warnings):
        self.steps(weight_rounding="nearest", lrs=(2e-5,) * 3)
        (message,) = warnings()
        assert message.startswith("weight_rounding=nearest: at a learning rate of 2e-05, 8")  # 80 to 89 %
        assert "% of the bfloat16 weights cannot move" in message
        assert "Use weight_rounding=stochastic, or train fp32 weights" in message

    def test_waits_for_the_end_of_a_warmup(self, warnings):
        self.steps(weight_rounding="nearest", lrs=(0.0, 1e-5, 1e-2))
        assert not warnings(), "at the highest rate nearly all weights move"

    @pytest.mark.parametrize(
        "options", [{"weight_rounding": "auto"}, {"weight_rounding": "nearest", "dtype": torch.float32}]
    )
    def test_is_silent_where_nothing_is_lost(self, warnings, options):
        self.steps(**options)
        assert not warnings()
