"""build_optimizer: param groups, learning rates and decays, errors, and the table that rank 0 logs."""

from __future__ import annotations

import logging

import torch
from torch import nn

from hf_muon import Muon, MuonConfig, build_optimizer


def model():
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(20, 8),
            "up": nn.Linear(8, 12),
            "down": nn.Linear(12, 8, bias=False),
            "norm": nn.LayerNorm(8),
        }
    )


def summary(optimizer):
    return [(g["use_muon"], g["lr"], g["weight_decay"], g["param_names"]) for g in optimizer.param_groups]


def test_groups():
    optimizer = build_optimizer(model(), lr=0.01, weight_decay=0.1)
    assert isinstance(optimizer, Muon)
    assert summary(optimizer) == [
        (True, 0.01, 0.1, ["up.weight", "down.weight"]),
        (False, 0.01, 0.1, ["embed.weight"]),
        (False, 0.01, 0.0, ["up.bias", "norm.weight", "norm.bias"]),
    ]
    assert optimizer.defaults["lr"] == 0.01


def test_rates_and_decays_of_muon_and_adamw():
    options = {"muon_lr": 0.5, "adamw_lr": 0.001, "adamw_weight_decay": 0.3}
    rows = summary(build_optimizer(model(), lr=0.01, weight_decay=0.0, **options))
    assert [row[1:3] for row in rows] == [(0.5, 0.0), (0.001, 0.3), (0.001, 0.0)]


def test_config_mapping_and_options_agree():
    expected = summary(build_optimizer(model(), momentum=0.9, muon_lr=1e-5))
    assert summary(build_optimizer(model(), {"momentum": 0.9, "muon_lr": "1e-5"})) == expected
    assert summary(build_optimizer(model(), MuonConfig(momentum=0.8, muon_lr=1e-5), momentum=0.9)) == expected


def test_lora_factors_alone():
    lora = nn.ModuleDict({"lora_A": nn.Linear(8, 4, bias=False), "lora_B": nn.Linear(4, 8, bias=False)})
    assert build_optimizer(lora, lora="muon").param_groups[0]["param_names"] == ["lora_A.weight", "lora_B.weight"]


def test_tied_parameters_are_stepped_once():
    tied = nn.ModuleDict({"a": nn.Linear(6, 6, bias=False), "b": nn.Linear(6, 6, bias=False)})
    tied["b"].weight = tied["a"].weight
    optimizer = build_optimizer(tied)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_rank_zero_logs_one_table(caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "hf_muon"):
        build_optimizer(model())
        assert len(caplog.records) == 1
        assert "up.weight" in caplog.text
        assert "hidden matrix" in caplog.text
        monkeypatch.setenv("RANK", "1")
        build_optimizer(model())
        assert len(caplog.records) == 1


def test_views_reach_the_group():
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, bias=False), "conv": nn.Conv1d(4, 6, 3)})
    (group, _) = build_optimizer(attention).param_groups
    assert dict(zip(group["param_names"], group["views"], strict=True)) == {
        "attention.in_proj_weight": "rows 8+8+8",
        "attention.out_proj.weight": "",
        "conv.weight": "flat",
    }


def test_frozen_parameters_are_logged(caplog):
    base = model()
    base["down"].weight = nn.Parameter(torch.zeros(4, 6, dtype=torch.uint8), requires_grad=False)
    base["norm"].requires_grad_(False)
    with caplog.at_level(logging.INFO, "hf_muon"):
        build_optimizer(base)
    assert caplog.text.splitlines()[-1] == "frozen: 3 parameters, 1 of them quantized (uint8)"


def test_build_is_bit_equal_to_the_two_optimizers_apart():
    """Compare with a Muon over the matrices and torch's AdamW over the other parameters."""
    torch.manual_seed(0)
    one, other = model(), model()
    other.load_state_dict(one.state_dict())
    optimizer = build_optimizer(one, lr=0.01, weight_decay=0.1)
    matrices = [other["up"].weight, other["down"].weight]
    muon = Muon(matrices, lr=0.01, weight_decay=0.1)
    adamw = torch.optim.AdamW(
        [
            {"params": [other["embed"].weight]},
            {"params": [other["up"].bias, *other["norm"].parameters()], "weight_decay": 0.0},
        ],
        lr=0.01,
        weight_decay=0.1,
    )
    for _ in range(5):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
