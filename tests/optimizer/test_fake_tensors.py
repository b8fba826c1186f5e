"""A step without values, as memory estimators take it: on the meta device, and with fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon import Muon, build_optimizer


def stepped(dtype=torch.float32, device="cpu", steps=2, **options):
    with torch.device(device):
        # Wide enough for the Gram form.
        model = nn.Sequential(nn.Linear(140, 65), nn.LayerNorm(65), nn.Linear(65, 30), nn.Linear(30, 30))
        if dtype != torch.float32:
            model.to(dtype)
        optimizer = build_optimizer(model, **options)
        for _ in range(steps):
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
    return optimizer


def facts(optimizer):
    return [
        {key: (value.shape, value.dtype) for key, value in optimizer.state[param].items()}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_meta_device(momentum_dtype, dtype):
    optimizer = stepped(dtype, "meta", momentum_dtype=momentum_dtype)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert facts(optimizer) == facts(stepped(dtype, momentum_dtype=momentum_dtype))


@pytest.mark.parametrize("weight_rounding", ["nearest", "stochastic"])
def test_rounded_weights_on_the_meta_device(weight_rounding, tmp_path):
    """Take two steps: nothing counts the weights that rounding to nearest leaves as they are, or measures metrics."""
    file = tmp_path / "file"
    options = {"weight_rounding": weight_rounding, "adamw_state_dtype": "int8", "diagnostics_every": 1}
    optimizer = stepped(torch.bfloat16, "meta", diagnostics_file=str(file), **options)
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    assert not file.exists()


@pytest.mark.parametrize("momentum_dtype", ["fp32", "int8"])
def test_with_fake_tensors(momentum_dtype):
    with FakeTensorMode():
        of_fakes = facts(stepped(momentum_dtype=momentum_dtype, max_batch_bytes=1))
    assert of_fakes == facts(stepped(momentum_dtype=momentum_dtype))


def test_a_fake_step_of_adamw_counts_as_torchs_does():
    with FakeTensorMode():
        ours, theirs = (nn.Parameter(torch.randn(5)) for _ in range(2))
        optimizer, adamw = Muon([{"params": [ours], "use_muon": False}]), torch.optim.AdamW([theirs])
        for _ in range(2):
            ours.grad, theirs.grad = torch.randn(5), torch.randn(5)
            optimizer.step()
            adamw.step()
        assert float(optimizer.state[ours]["step"]) == float(adamw.state[theirs]["step"]) == 2
