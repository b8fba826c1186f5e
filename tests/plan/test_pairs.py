"""Plans of `lora: product` compared with what ranks allocate, send and compute."""

from __future__ import annotations

import weakref

import pytest
import torch

from hf_muon import MuonConfig, build_optimizer
from hf_muon.math import cost, rounding
from hf_muon.optimizer import partners
from hf_muon.plan.step_plan import plan_step
from tests.plan.plan_cases import measured_pairs
from tests.rules.factors import AdaptedModel


def planned(layout, ranks, dtype=torch.float32, **options):
    with torch.device("meta"):
        model = AdaptedModel()
    config = MuonConfig.from_mapping({"ns_dtype": "fp32", "lora": "product", **options})
    return plan_step(model, config, layout, ranks, dtype=dtype)


@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [
        ("ddp", 2, {}),
        ("ddp", 4, {"comm_dtype": "bf16"}),
        ("fsdp", 2, {"momentum_dtype": "bf16"}),
        ("fsdp", 3, {}),
        ("fsdp", 4, {"max_bucket_bytes": 512}),
        ("hsdp", 4, {"ns_steps": 3}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_flops_and_peak_are_those_of_the_step(pools, layout, ranks, options, dtype):
    ranks_measured = pools[ranks].run(measured_pairs, layout=layout, dtype=dtype, **options)
    plan = planned(layout, ranks, getattr(torch, dtype), **options)
    assert plan.sent_bytes == [rank["sent_bytes"] for rank in ranks_measured]
    assert plan.flops == [rank["flops"] for rank in ranks_measured]
    peak = max(rank["peak"] for rank in ranks_measured)
    assert peak <= plan.memory.step <= 4 * peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_process(monkeypatch, dtype):
    monkeypatch.setattr(rounding, "_CHUNKS", {})
    monkeypatch.setattr(cost, "_BLOCK_ROWS", {})
    step = measured_pairs(0, "single", dtype)
    plan = planned("single", 1, getattr(torch, dtype))
    assert (plan.flops, plan.sent_bytes, plan.memory.step) == ([step["flops"]], [0], step["peak"])


def test_copies_of_partners_end_with_the_step(monkeypatch):
    copies, whole_weight = [], partners.whole_weight

    def noted(param):
        whole = whole_weight(param)
        copies.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(partners, "whole_weight", noted)
    model = AdaptedModel()
    optimizer = build_optimizer(model, lora="product")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert len(copies) == 8
    assert not any(copy() is not None for copy in copies)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_refused_as_by_the_run(stage):
    words = rf"lora_product \(lora=product\) needs whole factors, and ZeRO-{stage} cuts matrices anywhere. Use ZeRO-0"
    with pytest.raises(RuntimeError, match=words):
        planned(f"zero{stage}", 2)


def test_what_the_run_refuses_is_refused():
    with pytest.raises(ValueError, match="lora_product and normalize each make the directions of whole matrices"):
        planned("fsdp", 2, normalize="rows")
    model = AdaptedModel()
    model.blocks[0].lora_A.requires_grad_(False)
    with pytest.raises(ValueError, match=r"blocks.0.lora_B.default.weight \(13, 3\) has no partner"):
        plan_step(model, MuonConfig(lora="product"), "ddp", 2)
