"""Plans, computed in one process, compared with measurements on all ranks."""

from __future__ import annotations

import pytest
import torch

from hf_muon import MuonConfig, route_parameters
from hf_muon.plan.step_plan import plan_step
from tests.plan.plan_cases import Several, measured


def test_the_model_has_weights_of_every_kind():
    views = {route.view for route in route_parameters(Several()) if route.view}
    assert views == {"rows 10+10+10", "flat, rows 2x4", "transposed"}


@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [
        ("ddp", 2, {}),
        ("ddp", 4, {"comm_dtype": "bf16"}),
        ("fsdp", 2, {"ns_steps": 3, "momentum_dtype": "int8"}),
        ("fsdp", 4, {"comm_dtype": "bf16", "max_batch_bytes": 1152}),
        ("hsdp", 4, {"momentum_dtype": "bf16"}),
        ("fsdp", 2, {"momentum_dtype": "bf16", "adamw_state_dtype": "int8"}),
        ("ddp", 2, {"momentum_dtype": "int8", "adamw_state_dtype": "bf16"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_memory_and_flops_are_those_of_the_step(pools, layout, ranks, options, dtype):
    ranks_measured = pools[ranks].run(measured, layout=layout, dtype=dtype, **options)
    config = MuonConfig.from_mapping({"ns_dtype": "fp32", **options})
    with torch.device("meta"):
        model = Several()
    plan = plan_step(model, config, layout, ranks, dtype=getattr(torch, dtype))
    for quantity in ("sent_bytes", "flops", "state_bytes"):
        assert getattr(plan, quantity) == [rank[quantity] for rank in ranks_measured], quantity
    assert plan.memory.state == plan.state_bytes
    assert plan.memory.weights == [rank["weight_bytes"] for rank in ranks_measured]
    assert plan.memory.gradients == [rank["gradient_bytes"] for rank in ranks_measured]
    assert max(rank["peak"] for rank in ranks_measured) <= plan.memory.step


@pytest.mark.parametrize("momentum_dtype", ["auto", "int8"])
def test_one_process(momentum_dtype):
    step = measured(0, "single", momentum_dtype=momentum_dtype)
    plan = plan_step(Several(), MuonConfig(ns_dtype="fp32", momentum_dtype=momentum_dtype), "single", 1)
    assert (plan.flops, plan.state_bytes, plan.sent_bytes) == ([step["flops"]], [step["state_bytes"]], [0])
    assert plan.balance == 1


def test_int8_momentum_in_flat_partitions():
    with pytest.raises(RuntimeError, match=r"is a flat ZeRO partition, .* momentum_dtype=int8 .* Use bf16"):
        plan_step(Several(), MuonConfig(momentum_dtype="int8"), "zero2", 2)


def test_offloaded_moments_in_flat_partitions():
    with pytest.raises(RuntimeError, match=r"is a flat ZeRO partition.*momentum_offload"):
        plan_step(Several(), MuonConfig(momentum_offload="cpu"), "zero2", 2)


@pytest.mark.parametrize(
    ("layout", "ranks", "replicas", "message"),
    [
        ("fdsp", 2, 1, r"layout fdsp is not valid\. Valid: single, ddp, fsdp"),
        ("fsdp", 0, 1, "0 ranks are not valid"),
        ("single", 2, 1, "layout single is one process, not 2 ranks"),
        ("hsdp", 4, 3, "3 replicas do not divide 4 ranks"),
    ],
)
def test_refused(layout, ranks, replicas, message):
    with pytest.raises(ValueError, match=message):
        plan_step(Several(), MuonConfig(), layout, ranks, replicas=replicas)
