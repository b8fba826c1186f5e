"""A step in which no parameter has a gradient trains nothing; the optimizer warns once, with the likely cause."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from hf_muon import build_optimizer

WARNING = "no parameter of this optimizer has a gradient, so that the step changes nothing"


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("late", [False, True])
def test_built_before_fully_shard(late, caplog):
    model = net()
    if not late:
        fully_shard(model)
    optimizer = build_optimizer(model)
    if late:
        fully_shard(model)
    train(model, optimizer)
    assert caplog.text.count(WARNING) == late
    assert ("fully_shard" in caplog.text) is late


def test_built_before_to_empty(caplog):
    with torch.device("meta"):
        model = net()
    optimizer = build_optimizer(model)
    model.to_empty(device="cpu")
    train(model, optimizer)
    assert caplog.text.count(WARNING) == 1
    assert "they are on the meta device. Build the optimizer after the model was materialized" in caplog.text


def test_nothing_requires_a_gradient(caplog):
    model = net()
    optimizer = build_optimizer(model)
    model.requires_grad_(False)
    optimizer.step()
    assert "none of them requires a gradient" in caplog.text


def test_after_a_resume(caplog):
    """Warn although the loaded state counts steps: another optimizer took them."""
    model = net()
    optimizer, other = build_optimizer(model), build_optimizer(net())
    train(model, optimizer)
    other.load_state_dict(optimizer.state_dict())
    assert WARNING not in caplog.text
    other.step()
    assert caplog.text.count(WARNING) == 1


def test_steps_that_torch_takes_to_make_state_are_no_such_steps(caplog):
    model = net()
    optimizer = build_optimizer(model)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    train(model, optimizer)
    assert WARNING not in caplog.text


def test_a_part_of_the_parameters_may_have_none(caplog):
    model = net()
    optimizer = build_optimizer(model)
    model[0](torch.randn(2, 6)).sum().backward()
    optimizer.step()
    assert WARNING not in caplog.text
