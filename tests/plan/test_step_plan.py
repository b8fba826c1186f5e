"""Plans, computed in one process, compared with measurements on all ranks."""

from __future__ import annotations

import pytest
import torch

from hf_muon import MuonConfig, route_parameters
from hf_muon.plan.step_plan import plan_step
from tests.e2e.layout_cases import needs_native
from tests.e2e.measured_step import on_meta
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
        ("fsdp", 4, {"comm_dtype": "bf16", "max_bucket_bytes": 4096}),
        ("hsdp", 4, {"momentum_dtype": "bf16"}),
        ("hsdp", 4, {"normalize": "rows"}),
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
        ("fdsp", 2, 1, "layout='fdsp' is not valid. Did you mean fsdp\\? Valid: single, ddp, fsdp"),
        ("fsdp", 0, 1, "ranks=0 is not valid"),
        ("single", 2, 1, "layout=single is one process, and ranks=2"),
        ("hsdp", 4, 3, "replicas=3 do not divide ranks=4"),
    ],
)
def test_refused(layout, ranks, replicas, message):
    with pytest.raises(ValueError, match=message):
        plan_step(Several(), MuonConfig(), layout, ranks, replicas=replicas)


@needs_native
@pytest.mark.parametrize(
    ("experts", "layout", "sizes", "message"),
    [
        (False, "ddp", {"tp_size": 2}, "tp_size=2 needs layout tp, fsdp, hsdp, and layout=ddp"),
        (False, "fsdp", {"tp_size": 0}, "tp_size=0 is not valid"),
        (False, "fsdp", {"tp_size": 3}, "tp_size=3 does not divide the 8 ranks of the run"),
        (False, "tp", {"tp_size": 4}, "tp_size=4 is not valid with layout=tp, where all of ranks=8"),
        (True, "hsdp", {"tp_size": 2, "ep_size": 3}, "expected a multiple of tp_size=2 that divides the 4 ranks of a"),
        (True, "fsdp", {"ep_size": 8}, "ep_size=8 does not fit Qwen3MoeForCausalLM: Cannot evenly shard 4 experts"),
    ],
)
def test_refused_sizes(experts, layout, sizes, message):
    with pytest.raises(ValueError, match=message):
        plan_step(on_meta(experts=experts), MuonConfig(), layout, 8, **sizes)


@needs_native
def test_refused_models():
    with pytest.raises(RuntimeError, match=r"tp_size=2 needs a model of transformers.* and Several is none"):
        plan_step(Several(), MuonConfig(), "tp", 2)
    with pytest.raises(RuntimeError, match=r"ep_size=2: Qwen3ForCausalLM of transformers has no ep_plan, so it is not"):
        plan_step(on_meta(experts=False), MuonConfig(), "fsdp", 2, ep_size=2)
    dense = on_meta(experts=True)
    dense._ep_plan = {"model.layers.*.mlp.none": "ep_dispatch_experts"}
    with pytest.raises(RuntimeError, match=r"has no experts that its ep_plan distributes. Leave ep_size out"):
        plan_step(dense, MuonConfig(), "fsdp", 2, ep_size=2)
