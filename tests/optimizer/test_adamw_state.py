"""`adamw_state_dtype`: what is stored, that it does not stall, and conversion on load."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from hf_muon.config import MuonConfig
from hf_muon.math.moments import decoded
from hf_muon.plan.step_plan import plan_step
from tests.optimizer.test_half_weights import normal, optimizer_of


@pytest.mark.parametrize(
    ("weights", "option", "stored"),
    [
        (torch.bfloat16, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.float32, "auto", torch.float32),
        (torch.float64, "auto", torch.float64),
        (torch.float64, "fp32", torch.float64),
        (torch.float64, "int8", torch.float32),  # short rows
        (torch.bfloat16, "bf16", torch.bfloat16),
        (torch.float32, "bf16", torch.bfloat16),
        (torch.float64, "bf16", torch.bfloat16),
    ],
)
def test_dtypes(weights, option, stored):
    param = nn.Parameter(normal(5, 3).to(weights))
    optimizer = optimizer_of(param, use_muon=False, adamw_state_dtype=option)
    for step in range(2):
        param.grad = normal(5, 3, seed=step).to(weights)
        optimizer.step()
    moments = optimizer.state[param]
    assert {moments["exp_avg"].dtype, moments["exp_avg_sq"].dtype} == {stored}
    assert moments["step"] == 2
    assert bool((moments["exp_avg_sq"] > 0).all())


@pytest.mark.parametrize("option", ["auto", "bf16", "int8"])
def test_moments_follow_those_of_fp32(option):
    """Take 1,000 steps: a second moment that were rounded to nearest in bf16 would stop at a third."""
    param, reference = (nn.Parameter(torch.zeros(8, 96, dtype=d)) for d in (torch.bfloat16, torch.float32))
    optimizer = optimizer_of(param, use_muon=False, adamw_state_dtype=option, lr=1e-4)
    exact = torch.optim.AdamW([reference], lr=1e-4, weight_decay=0.0)
    for step in range(1000):
        grad = (1 + 0.1 * normal(8, 96, seed=step)).bfloat16()
        param.grad, reference.grad = grad, grad.float()
        optimizer.step()
        exact.step()
    for key, tolerance in (("exp_avg", 0.01), ("exp_avg_sq", 0.01)):
        ratio = decoded(optimizer.state[param], key).double().mean() / exact.state[reference][key].double().mean()
        assert float(ratio) == pytest.approx(1, abs=tolerance), key
    assert float(param.detach().double().mean() / reference.detach().double().mean()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_large_and_many_small_parameters_equal_one_by_one(weights):
    """Batches and chunks of AdamW do not change bits."""
    shapes = [(3,), (700, 700), (5, 2), (1,), (1000,), (300, 500), ()]

    def run(together):
        params = [nn.Parameter(normal(*shape, seed=i).to(weights)) for i, shape in enumerate(shapes)]
        groups = [params] if together else [[param] for param in params]
        optimizers = [
            Muon([{"params": group, "use_muon": False}], adamw_state_dtype="bf16", weight_decay=0.1) for group in groups
        ]
        for step in range(3):
            for i, (param, shape) in enumerate(zip(params, shapes, strict=True)):
                param.grad = normal(*shape, seed=100 * step + i).to(weights)
            for optimizer in optimizers:
                optimizer.step()
        return params

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


WORDS = {"auto": "fp32", "bf16": "bf16", "int8": "int8"}


@pytest.mark.parametrize("there", WORDS)
@pytest.mark.parametrize("here", WORDS)
def test_a_checkpoint_is_converted(there, here, caplog):
    caplog.set_level(logging.INFO)
    param = nn.Parameter(normal(6, 80).bfloat16())
    source = optimizer_of(param, use_muon=False, adamw_state_dtype=there)
    param.grad = normal(6, 80, seed=1).bfloat16()
    source.step()
    target = optimizer_of(param, use_muon=False, adamw_state_dtype=here)
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["adamw_state_dtype"] == here
    (moments,) = optimizer_after_a_step(param, here).state.values()
    assert target.state[param].keys() == moments.keys()
    for key, bits in (("exp_avg", 2), ("exp_avg_sq", 4)):
        exact, loaded = (decoded(o.state[param], key).double() for o in (source, target))
        if here == "int8" and there != "int8":
            # Half a level: of squares with 127 levels, and of fourth powers with 255.
            scale = exact.abs().max()
            assert (
                float(((loaded.abs() / scale) ** (1 / bits) - (exact.abs() / scale) ** (1 / bits)).abs().max()) < 0.02
            )
        else:
            dtype = torch.bfloat16 if here == "bf16" else torch.float32
            assert torch.equal(loaded, exact.to(dtype).double())
    messages = [record.getMessage() for record in caplog.records if "converted" in record.getMessage()]
    expected = f"moments are converted: adamw_state_dtype {WORDS[there]} in the checkpoint, {WORDS[here]} here"
    assert messages == ([expected] if there != here else [])


def optimizer_after_a_step(like, option):
    param = nn.Parameter(like.detach().clone())
    optimizer = optimizer_of(param, use_muon=False, adamw_state_dtype=option)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_dtype_that_is_changed_on_the_way_is_converted(weights):
    param = nn.Parameter(normal(6, 80).to(weights))
    optimizer = optimizer_of(param, use_muon=False)
    for option, dtypes in (
        ("int8", {torch.int8, torch.uint8, torch.float32}),
        ("bf16", {torch.bfloat16, torch.float32}),
        ("int8", {torch.int8, torch.uint8, torch.float32}),
        ("fp32", {torch.float32}),
    ):
        optimizer.param_groups[0]["adamw_state_dtype"] = option
        param.grad = normal(6, 80, seed=1).to(weights)
        optimizer.step()
        assert {value.dtype for value in optimizer.state[param].values()} == dtypes
    assert optimizer.state[param]["step"] == 4
    assert (
        float(decoded(optimizer.state[param], "exp_avg").sub(normal(6, 80, seed=1) * (1 - 0.9**4)).abs().max()) < 0.05
    )


def test_lost_scales_are_missing_moments():
    source = optimizer_after_a_step(torch.zeros(6, 80), "int8")
    saved = source.state_dict()
    del saved["state"][0]["exp_avg_sq_scale"]
    target = optimizer_of(nn.Parameter(torch.zeros(6, 80)), use_muon=False, adamw_state_dtype="int8")
    with pytest.raises(ValueError, match=r"moments are missing: parameter 0 .* lacks \['exp_avg_sq_scale'\]"):
        target.load_state_dict(saved)
    (param,) = source.param_groups[0]["params"]
    del source.state[param]["exp_avg_scale"]
    with pytest.raises(RuntimeError, match="lacks exp_avg_scale"):
        source.step()


def test_rows_of_rare_tokens_follow_fp32():
    """Step an embedding whose rows have gradients in every step, or in one of 2, 4, ... 256."""
    rows, steps = 9, 512
    ends = {}
    for option in ("fp32", "bf16", "int8"):
        weight = nn.Parameter(torch.zeros(rows, 128))
        optimizer = optimizer_of(weight, use_muon=False, adamw_state_dtype=option, lr=1e-3)
        for step in range(steps):
            weight.grad = normal(rows, 128, seed=step) + normal(rows, 128, seed=1000)
            for row in range(rows):
                if step % 2**row:
                    weight.grad[row] = 0
            optimizer.step()
        ends[option] = weight.detach()
    for option, bound in (("bf16", 0.02), ("int8", 0.06)):
        errors = (ends[option] - ends["fp32"]).norm(dim=1) / ends["fp32"].norm(dim=1)
        assert float(errors.max()) < bound, f"{option}: {errors.tolist()}"


@pytest.mark.parametrize("option", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_the_bytes(option, dtype):
    model = nn.Sequential(nn.Embedding(40, 200), nn.Linear(200, 24), nn.LayerNorm(24), nn.Linear(24, 40)).to(dtype)
    optimizer = build_optimizer(model, adamw_state_dtype=option, momentum_dtype=option)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    measured = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    config = MuonConfig(adamw_state_dtype=option, momentum_dtype=option)
    assert plan_step(model, config, "single", 1, dtype=dtype).state_bytes == [measured]
