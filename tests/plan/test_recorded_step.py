"""The calls that a plan records are those of an optimizer that steps."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest
import torch
from torch import nn

from benchmarks.fake_layouts import meta_model
from benchmarks.rehearsal import options_of, ranks_of
from benchmarks.rehearsal_table import EXPERTS, LORA, Case, read_table
from hf_muon import MuonConfig, build_optimizer, route_parameters
from hf_muon.math.precision import NS_DTYPES
from hf_muon.plan.calls import Calls, recording
from hf_muon.plan.parallelism import sizes_of
from hf_muon.plan.recorded_step import record_step
from hf_muon.plan.stand_ins import cuts_on
from hf_muon.plan.step_plan import plan_step
from tests.e2e.layout_cases import needs_native
from tests.e2e.measured_step import on_meta
from tests.plan.plan_cases import Several

BF16 = torch.bfloat16
TABLE = read_table()
# What a step asks of gradients, which tensors without values do not have.
CHECKS = {"_foreach_norm", "_foreach_div", "stack", "le", "all", "ones"}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (Case(), "single"),
        (Case(ns_dtype="fp16"), "single"),
        (Case(momentum="int8"), "single"),
        (Case(weights="fp32"), "single"),
        (Case(weights="fp32", momentum="bf16", adamw="bf16"), "single"),
        (Case(EXPERTS), "single"),
        (Case(LORA), "single"),
        (Case(layout="DDP", ranks=8), "ddp"),
        (Case(layout="FSDP2", ranks=8), "fsdp"),
        (Case(layout="HSDP", ranks=8), "hsdp"),
        (Case(EXPERTS, "FSDP2", 8), "fsdp"),
        pytest.param(Case(layout="TP", ranks=8), "tp", marks=needs_native),
        pytest.param(Case(layout="FSDP2 and TP", ranks=64), "fsdp", marks=[needs_native, pytest.mark.extended]),
        (Case(layout="ZeRO-1 or 2", ranks=8, weights="fp32"), "zero2"),
        (Case(layout="ZeRO-3", ranks=8, weights="fp32"), "zero3"),
    ],
    ids=str,
)
def test_launches_and_traffic_are_those_of_the_committed_table(case, layout):
    """Compare with optimizers that step models, as `benchmarks.rehearsal` counts them."""
    model, config = meta_model(case.model, NS_DTYPES[case.weights]), MuonConfig.from_mapping(options_of(case))
    routes = route_parameters(model, config)
    dtype = routes[0].parameter.dtype  # peft's factors are fp32
    tp_size = 8 if "TP" in case.layout else None
    options = {"dtype": dtype, "ns_dtype": NS_DTYPES[case.ns_dtype]}
    options["cuts"] = cuts_on(model, sizes_of(layout, case.ranks, 1, tp_size, 1))
    recorded = [record_step(routes, config, layout, case.ranks, rank, **options) for rank in ranks_of(case)]
    launches = [step.launches + step.collectives for step in recorded]
    expected = TABLE[case]
    assert (round(fmean(launches), 1), max(launches)) == (expected.launches, expected.most)
    assert max(step.collectives for step in recorded) == expected.collectives
    if case.ranks == 1:
        total = sum(param.numel() for param in model.parameters() if param.requires_grad)
        assert round(recorded[0].traffic / total, 1) == expected.traffic


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_on_a_cpu_the_calls_are_those_of_a_step_with_values(dtype, momentum_dtype):
    model = nn.Sequential(nn.Linear(500, 400), nn.LayerNorm(400), nn.Linear(400, 30), nn.Linear(30, 30)).to(dtype)
    config = MuonConfig(ns_dtype="fp32", momentum_dtype=momentum_dtype)
    recorded = record_step(route_parameters(model, config), config, dtype=dtype, ns_dtype=torch.float32, device="cpu")
    optimizer = build_optimizer(model, config)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        calls = Calls("cpu")
        with recording(calls):
            optimizer.step()
    own = Counter(call for call in calls.calls if call.product is not None)
    assert own == Counter(call for call in recorded.calls if call.product is not None)
    assert len(own) > 10  # blocks of rows
    names = Counter(call.name for call in recorded.calls if call.name not in ("norms of gradients", "read"))
    steps = Counter(call.name for call in calls.calls)
    assert set(steps) - set(names) <= CHECKS
    assert all(abs(names[name] - steps[name]) <= 3 for name in set(names) - CHECKS), (names, steps)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("single", 1), ("ddp", 2), ("fsdp", 3), ("hsdp", 4), ("zero1", 3), ("zero2", 2), ("zero3", 3)],
)
def test_products_of_each_rank_are_those_of_the_plan(layout, ranks):
    config = MuonConfig(ns_dtype="fp32")
    plan = plan_step(Several(), config, layout, ranks)
    routes = route_parameters(Several(), config)
    steps = [record_step(routes, config, layout, ranks, rank, ns_dtype=torch.float32) for rank in range(ranks)]
    assert [step.flops for step in steps] == plan.flops
    assert all(step.collectives > 0 for step in steps) == (ranks > 1)
    on_cpu = [
        record_step(routes, config, layout, ranks, rank, ns_dtype=torch.float32, device="cpu") for rank in range(ranks)
    ]
    assert sum(step.flops for step in on_cpu) == sum(plan.flops)


@needs_native
@pytest.mark.parametrize(
    ("layout", "ranks", "sizes"),
    [("tp", 2, {"ep_size": 2}), ("fsdp", 4, {"tp_size": 2}), ("hsdp", 8, {"tp_size": 2, "ep_size": 4})],
)
def test_products_of_each_rank_of_tensor_and_expert_parallelism(layout, ranks, sizes):
    model, config = on_meta(experts="ep_size" in sizes), MuonConfig(ns_dtype="fp32")
    plan = plan_step(model, config, layout, ranks, **sizes)
    cuts = cuts_on(model, sizes_of(layout, ranks, 2, plan.tp_size, plan.ep_size))
    routes = route_parameters(model, config)
    options = {"ns_dtype": torch.float32, "cuts": cuts}
    assert [record_step(routes, config, layout, ranks, rank, **options).flops for rank in range(ranks)] == plan.flops


def test_a_product_of_plain_matrices_and_one_that_adds():
    a, b, c = (torch.empty(*shape, device="meta") for shape in ((4, 6), (6, 10), (2, 4, 10)))
    calls = Calls()
    with recording(calls):
        a @ b
        torch.baddbmm(c, a.expand(2, 4, 6), b.expand(2, 6, 10))
    plain, added = (call.product for call in calls.calls)
    assert (plain.sizes, plain.flops, plain.nbytes) == ((1, 4, 10, 6), 480, 4 * (24 + 60 + 40))
    assert (added.sizes, added.flops, added.nbytes) == ((2, 4, 10, 6), 960, 2 * 4 * (24 + 60 + 80))
