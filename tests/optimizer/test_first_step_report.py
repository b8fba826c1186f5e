"""The report of the first step in one process; `tests/e2e/test_llamafactory_v1.py` reads it under DDP and FSDP2."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from hf_muon import build_optimizer


@pytest.fixture
def optimizer():
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    model.lm_head = nn.Linear(5, 7).bfloat16()
    optimizer = build_optimizer(model, ns_steps=4, ns_dtype="fp32")
    for name, param in model.named_parameters():
        if name != "2.weight":
            param.grad = torch.ones_like(param)
    return optimizer


@pytest.fixture
def reports(caplog):
    caplog.set_level(logging.INFO, "hf_muon")
    caplog.clear()
    return lambda: [text for text in caplog.messages if text.startswith("the first step of Muon")]


@pytest.mark.parametrize("variable", ["HF_MUON_STEP_REPORT", "LLAMAFACTORY_MUON_DIAG"])
def test_one_report_with_one_entry_for_each_kind(variable, optimizer, reports, monkeypatch):
    monkeypatch.setenv(variable, "1")
    for _ in range(3):
        optimizer.step()
    (report,) = reports()
    lines = report.splitlines()
    assert lines[0] == "the first step of Muon, as rank 0 sees it (one process, no process group):"
    step = "    step       Muon, whole on this rank: 4 Newton-Schulz steps in float32"
    entry = [
        "0.weight",
        "    parameter  Parameter (5, 5), float32, cpu",
        "    gradient   Tensor (5, 5), float32, cpu",
        step,
    ]
    start = lines.index("0.weight")
    assert lines[start : start + 4] == entry
    assert lines[lines.index("2.weight") + 2] == "    gradient   none"
    head = lines.index("lm_head.weight")
    assert lines[head + 1] == "    parameter  Parameter (7, 5), bfloat16, cpu"
    assert lines[head + 3] == "    step       AdamW on the local part, no communication"


def test_layers_share_an_entry(reports, monkeypatch):
    monkeypatch.setenv("HF_MUON_STEP_REPORT", "yes")
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(12))})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    build_optimizer(model).step()
    (report,) = reports()
    assert report.splitlines()[1] == "layers.*.weight  (12 of them)"
    assert len(report.splitlines()) == 5


def test_how_a_weight_is_seen(reports, monkeypatch):
    monkeypatch.setenv("HF_MUON_STEP_REPORT", "1")
    model = nn.MultiheadAttention(4, 2, bias=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    build_optimizer(model).step()
    (report,) = reports()
    lines = report.splitlines()
    assert lines[lines.index("in_proj_weight") + 2] == "    seen as    rows 4+4+4"
    assert len(lines) == 1 + 5 + 4


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_nothing_otherwise(value, optimizer, reports, monkeypatch, capsys):
    for variable in ("HF_MUON_STEP_REPORT", "LLAMAFACTORY_MUON_DIAG"):
        monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv("HF_MUON_STEP_REPORT", value)
    optimizer.step()
    assert reports() == []
    assert capsys.readouterr().out == ""


def test_other_ranks_say_nothing(optimizer, reports, monkeypatch):
    monkeypatch.setenv("HF_MUON_STEP_REPORT", "1")
    monkeypatch.setenv("RANK", "1")
    optimizer.step()
    assert reports() == []


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
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    assert len(reports()) == 1
