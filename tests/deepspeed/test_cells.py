"""Cells of `tests.equality` under ZeRO, and models and settings of ZeRO that hypothesis draws."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.layouts import LAYOUTS
from tests.deepspeed.runs import CPU, assert_same, rank_of_environment, whole_state
from tests.equality.cells import Cell, few_first, pairwise
from tests.equality.checks import check
from tests.equality.drawn import STEPS, models
from tests.equality.models import Given

FIRST = [f"{layout}-2" for layout in ("zero2", "zero2_cpu", "zero3")]
REST = [*(f"{layout}-2" for layout in LAYOUTS if f"{layout}-2" not in FIRST), "zero3_hpz-4"]
VALUES = {
    "model": ["small", "wide"],
    "rule": ["plain", "together", "original", "others", "watched"],
    "momentum": ["auto", "bf16"],
    "adamw": ["auto", "bf16"],
    "batch": [0, 1, 1125],
    "numbers": ["cpu", "gpu"],
    "then": ["zero2-2", "zero3_cpu-2", "zero1-4", "zero0-4"],
}


def array(places, then=VALUES["then"]):
    return pairwise({"place": list(places), **VALUES, "then": then}, lambda cell: True)


# Stage 1 is in the first tier in a chain of test_training.py, and ZeRO-0 with faults.
CELLS = few_first(array(FIRST, VALUES["then"][:3]))
CELLS += few_first(array(REST), pytest.mark.extended)


# DeepSpeed steps one group after the other: the first can refuse a step. In these stages the engine then goes on.
FAULTS = [Cell(place="zero0-2", fault="step"), Cell(place="zero3-2", fault="option"), Cell(place="zero3-2", fault="lr")]


@pytest.mark.parametrize("cell", [*FAULTS, *CELLS], ids=str)
def test_pairs_of_values(pools, cell, tmp_path):
    check(cell, pools, str(tmp_path))


# --- random models


def settings_of(stage):
    """Return a strategy of settings of a stage of ZeRO."""
    buckets = st.sampled_from([50, 500, 10**6])
    own = {name: st.booleans() for name in ("contiguous_gradients", "overlap_comm", "reduce_scatter")}
    own |= {"reduce_bucket_size": buckets}
    if stage:
        own |= {"offload_optimizer": st.sampled_from([{"device": "none"}, CPU["offload_optimizer"]])}
    if stage in (1, 2):
        own |= {"round_robin_gradients": st.booleans(), "allgather_bucket_size": buckets}
    if stage == 3:
        own |= {
            "memory_efficient_linear": st.just(False),
            "sub_group_size": st.sampled_from([1, 100, 10**9]),
            "stage3_param_persistence_threshold": st.sampled_from([0, 50, 10**5]),
            "stage3_max_live_parameters": st.sampled_from([0, 10**9]),
            "stage3_prefetch_bucket_size": st.sampled_from([0, 10**6]),
        }
    return st.fixed_dictionaries({"stage": st.just(stage), **own})


def fitted(drawn, zero, dtype):
    """Return a drawn model that ZeRO takes: of one dtype, without numbers, int8, or a step without gradients."""
    params = [dataclasses.replace(p, shape=p.shape or (1,), dtype=dtype) for p in drawn.params]
    params[0] = dataclasses.replace(params[0], grads=("all",) * STEPS)
    options = dict(drawn.options)
    if options["momentum_dtype"] == "int8":
        options["momentum_dtype"] = "bf16"
    if zero.get("sub_group_size", 10**9) < 10**9:
        # ZeRO steps one sub-group after the other, so that matrices of one shape form other batches.
        options["max_batch_bytes"] = 1
    return dataclasses.replace(drawn, params=tuple(params), options=tuple(options.items()))


def module_of(drawn):
    module = Given({f"p{i}": param.shape for i, param in enumerate(drawn.params)})
    for param, weight in zip(module.parameters(), drawn.tensors(0), strict=True):
        param.data = weight
    return module


def gradients(drawn, step):
    """Return gradients by name, the same on all ranks; those that no rank has are missing."""
    named = enumerate(zip(drawn.params, drawn.tensors(step + 1), strict=True))
    return {f"p{i}": grad for i, (param, grad) in named if param.grads[step] != "none"}


def compare(rank, drawn, zero, dtype):
    """Check that weights, masters and moments are, bit by bit, those of one process with fp32 masters."""
    rank_of_environment()
    module, masters = module_of(drawn), module_of(drawn).float()
    optimizer = drawn.optimizer(list(module.parameters()))
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero}
    config |= {"bf16": {"enabled": dtype == "bfloat16"}}
    engine, *_ = initialize(model=module, optimizer=optimizer, config=config)
    alone = drawn.optimizer(list(masters.parameters()))
    for step in range(STEPS):
        grads = gradients(drawn, step)
        engine.backward(engine(grads))
        engine.step()
        for name, param in masters.named_parameters():  # in flat partitions a missing gradient is zeros
            param.grad = grads[name].float() if name in grads else torch.zeros_like(param)
        alone.step()
    state = whole_state(engine, optimizer)
    engine.destroy()
    for name, param in masters.named_parameters():
        expected = {"weight": param.detach().to(getattr(torch, dtype)), "master": param.detach().flatten()}
        expected |= {key: value.flatten() for key, value in alone.state[param].items()}
        assert_same({name: state[name]}, {name: expected})


@pytest.mark.extended
@pytest.mark.second_tier("2|3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_random_models_in_random_settings(ranks, stage):
    """Run in one process what ranks do whose gradients are equal: their mean is exact in every order and dtype."""

    @settings(max_examples=15 if stage == 3 else 40, suppress_health_check=list(HealthCheck))
    @given(models(2), settings_of(stage), st.sampled_from(["float32", "float32", "bfloat16"] if stage else ["float32"]))
    def check_one(drawn, zero, dtype):
        ranks.run(compare, drawn=fitted(drawn, zero, dtype), zero=zero, dtype=dtype)

    check_one()
