"""Plans, computed in one process, beside measurements on all ranks."""

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
    ("layout", "ranks", "dtype", "options"),
    [
        ("single", 1, "float32", {}),
        ("single", 1, "bfloat16", {"momentum_dtype": "int8"}),
        ("ddp", 2, "float32", {"momentum_dtype": "int8", "adamw_state_dtype": "bf16"}),
        ("ddp", 4, "bfloat16", {"comm_dtype": "bf16"}),
        ("fsdp", 2, "bfloat16", {"momentum_dtype": "bf16", "adamw_state_dtype": "int8"}),
        ("fsdp", 2, "float32", {"ns_steps": 3, "momentum_dtype": "int8"}),
        ("fsdp", 4, "float32", {"comm_dtype": "bf16", "max_batch_bytes": 1152}),
        ("hsdp", 4, "float32", {"momentum_dtype": "bf16"}),
    ],
)
def test_bytes_memory_and_flops_are_those_of_the_step(pools, layout, ranks, dtype, options):
    arguments = {"layout": layout, "dtype": dtype, **options}
    ranks_measured = [measured(0, **arguments)] if ranks == 1 else pools[ranks].run(measured, **arguments)
    with torch.device("meta"):
        model = Several()
    config = MuonConfig.from_mapping({"ns_dtype": "fp32", **options})
    plan = plan_step(model, config, layout, ranks, dtype=getattr(torch, dtype))
    for quantity in ("sent_bytes", "flops", "state_bytes"):
        assert getattr(plan, quantity) == [rank[quantity] for rank in ranks_measured], quantity
    assert plan.memory.state == plan.state_bytes
    assert plan.memory.weights == [rank["weight_bytes"] for rank in ranks_measured]
    assert plan.memory.gradients == [rank["gradient_bytes"] for rank in ranks_measured]
    assert max(rank["peak"] for rank in ranks_measured) <= plan.memory.step
    assert ranks > 1 or plan.balance == 1
