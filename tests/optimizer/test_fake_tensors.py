"""A step without values, as memory estimators take it: on the meta device, and with fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon import Muon, build_optimizer


def net():
    # Wide enough for the Gram form.
    return nn.Sequential(nn.Linear(140, 65), nn.LayerNorm(65), nn.Linear(65, 30), nn.Linear(30, 30))


def facts(optimizer):
    return [
        {key: (value.shape, value.dtype) for key, value in optimizer.state[param].items()}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def real(steps, **options):
    model = net()
    optimizer = build_optimizer(model, options)
    for _ in range(steps):
        model(torch.randn(4, 140)).sum().backward()
        optimizer.step()
    return facts(optimizer)


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_meta_device(momentum_dtype, dtype):
    with torch.device("meta"):
        model = net().to(dtype)
    optimizer = build_optimizer(model, {"momentum_dtype": momentum_dtype})
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    if dtype is torch.float32:
        assert facts(optimizer) == real(3, momentum_dtype=momentum_dtype)


@pytest.mark.parametrize("weight_rounding", ["nearest", "stochastic"])
def test_rounded_weights_on_the_meta_device(weight_rounding):
    """Take two steps: nothing counts the weights that rounding to nearest leaves as they are."""
    with torch.device("meta"):
        model = net().bfloat16()
    optimizer = build_optimizer(model, {"weight_rounding": weight_rounding, "adamw_state_dtype": "int8"})
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
def test_with_fake_tensors(momentum_dtype):
    with FakeTensorMode():
        facts_of_fakes = real(3, momentum_dtype=momentum_dtype, max_batch_bytes=1)
    assert facts_of_fakes == real(3, momentum_dtype=momentum_dtype)


def test_a_fake_step_of_adamw_counts_as_torchs_does():
    with FakeTensorMode():
        ours, theirs = (nn.Parameter(torch.randn(5)) for _ in range(2))
        optimizer, adamw = Muon([{"params": [ours], "use_muon": False}]), torch.optim.AdamW([theirs])
        for _ in range(2):
            ours.grad, theirs.grad = torch.randn(5), torch.randn(5)
            optimizer.step()
            adamw.step()
        assert float(optimizer.state[ours]["step"]) == float(adamw.state[theirs]["step"]) == 2


def test_diagnostics_have_nothing_to_measure(tmp_path):
    with torch.device("meta"):
        model = net()
    optimizer = build_optimizer(model, diagnostics_every=1, diagnostics_file=str(tmp_path / "file"))
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        optimizer.step()
    assert not (tmp_path / "file").exists()
