"""What a step logs: the report of the first one, and a warning where no parameter has a gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from hf_muon import build_optimizer

# --- the report; `tests/e2e/test_llamafactory_v1.py` reads it under DDP and FSDP2


@pytest.fixture
def optimizer():
    """Return an optimizer over layers that share an entry, a fused matrix, a head in bf16, and one without gradient."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(12))})
    model["up"] = nn.Linear(5, 5)
    model["attention"] = nn.MultiheadAttention(4, 2, bias=False)
    model["lm_head"] = nn.Linear(5, 7).bfloat16()
    optimizer = build_optimizer(model, ns_steps=4, ns_dtype="fp32")
    for name, param in model.named_parameters():
        if name != "up.weight":
            param.grad = torch.ones_like(param)
    return optimizer


@pytest.fixture
def reports(caplog, monkeypatch):
    for variable in ("HF_MUON_STEP_REPORT", "LLAMAFACTORY_MUON_DIAG"):
        monkeypatch.delenv(variable, raising=False)
    caplog.clear()
    return lambda: [text for text in caplog.messages if text.startswith("the first step of Muon")]


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"HF_MUON_STEP_REPORT": "1"}, 1),
        ({"HF_MUON_STEP_REPORT": "yes"}, 1),
        ({"LLAMAFACTORY_MUON_DIAG": "1"}, 1),
        ({"HF_MUON_STEP_REPORT": "1", "RANK": "1"}, 0),
        *(({"HF_MUON_STEP_REPORT": value}, 0) for value in ("", "0", "false")),
        ({}, 0),
    ],
)
def test_one_report_with_one_entry_for_each_kind(variables, count, optimizer, reports, monkeypatch, golden, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in range(3):
        optimizer.step()
    assert len(reports()) == count
    for report in reports():
        golden("optimizer/first_step_report", report)
    assert capsys.readouterr().out == ""


def test_a_refused_step_is_reported_and_one_that_only_creates_state_is_not(optimizer, reports, monkeypatch):
    monkeypatch.setenv("HF_MUON_STEP_REPORT", "1")
    making_state = copy.deepcopy(optimizer)
    for group in making_state.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    making_state.step()
    assert reports() == []
    optimizer.param_groups[0]["params"][0].grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="gradient-not-finite"):
        optimizer.step()
    assert len(reports()) == 1


# --- a step in which no parameter has a gradient trains nothing; the optimizer warns once, with the likely cause

WARNING = "[no-gradients]"


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("late", [False, True])
def test_built_before_fully_shard(late, caplog):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = net()
        if not late:
            fully_shard(model)
        optimizer = build_optimizer(model)
        if late:
            fully_shard(model)
        train(model, optimizer)
    finally:
        dist.destroy_process_group()
    assert caplog.text.count(WARNING) == late
    assert ("fully_shard" in caplog.text) is late


def test_built_before_to_empty(caplog):
    with torch.device("meta"):
        model = net()
    optimizer = build_optimizer(model)
    model.to_empty(device="cpu")
    train(model, optimizer)
    assert caplog.text.count(WARNING) == 1
    assert "meta device" in caplog.text


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


def test_no_warning_of_gradients_of_some_or_of_steps_that_torch_takes_to_make_state(caplog):
    model = net()
    optimizer = build_optimizer(model)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    model[0](torch.randn(2, 6)).sum().backward()
    optimizer.step()
    assert WARNING not in caplog.text
