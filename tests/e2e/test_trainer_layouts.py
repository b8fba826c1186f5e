"""Trainer with `optim: muon` in the layouts it knows, against the same Trainer in one process with the same batches.

Real processes on gloo; `cpu_fsdp` opens FSDP2 on a CPU. Tests that need GPUs (NCCL, overlapping streams, fp16 through
Trainer) are at the end and marked `gpu`. `test_trainer_resume.py` has checkpoints.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.e2e import layouts_worker as worker
from tests.e2e.harness import ROOT, python
from tests.e2e.layout_cases import (
    DDP_RESUMES,
    OPTIONS,
    SAVE,
    SHARDED,
    WITH_DDP,
    Case,
    case,
    moved,
    needs_native,
    needs_parallelism,
    newest,
    resumed,
)
from tests.e2e.layout_stages import (
    Get,
    Result,
    Stages,
    assert_identical,
    assert_same_run,
    controls_of,
    distance,
    start_of,
)

pytestmark = pytest.mark.slow

FSDP2 = "DTensor (Shard(dim=0),) torch.float32"
HSDP2 = "DTensor (Replicate(), Shard(dim=0)) torch.float32"
PLAIN = "Tensor  torch.float32"


def stored(result: Result) -> set[str]:
    return set(result["stored"].values())


def test_one_process_learns(get: Get) -> None:
    losses = get("one")["losses"]
    assert losses[worker.STEPS] < 0.95 * losses[1]


@pytest.mark.promise("ddp", "fsdp2", "hsdp", "tensor-parallel")
@pytest.mark.first_tier("^(ddp|fsdp|fsdp_sharded|launched|hsdp|tp|native_tp)-one")
@pytest.mark.parametrize(
    ("name", "reference", "kind", "storage"),
    [
        ("ddp", "one", "MULTI_CPU", {PLAIN}),
        ("fsdp", "one", "FSDP", {FSDP2}),
        ("fsdp_sharded", "one", "FSDP", {FSDP2}),
        ("launched", "one", "FSDP", {FSDP2}),
        pytest.param("four_ddp", "one", "MULTI_CPU", {PLAIN}, marks=newest),
        pytest.param("four_fsdp", "one", "FSDP", {FSDP2}, marks=newest),
        pytest.param("hsdp", "one", "FSDP", {HSDP2}, marks=needs_parallelism),
        pytest.param("hsdp_arguments", "one", "FSDP", {HSDP2}, marks=needs_parallelism),
        pytest.param(
            "tp", "one_even", "MULTI_CPU", {PLAIN, FSDP2, FSDP2.replace("0", "1", 1)}, marks=needs_parallelism
        ),
        pytest.param("native_fsdp", "one", "MULTI_CPU", {FSDP2}, marks=needs_native),
        pytest.param(
            "native_tp", "one_even", "MULTI_CPU", {PLAIN, FSDP2, FSDP2.replace("0", "1", 1)}, marks=needs_native
        ),
        pytest.param("native_hsdp", "one", "MULTI_CPU", {HSDP2}, marks=needs_native),
        pytest.param("native_fsdp_tp", "one_even", "MULTI_CPU", None, marks=needs_native),
    ],
)
def test_layout_equals_one_process(name: str, reference: str, kind: str, storage: set[str] | None, get: Get) -> None:
    result = get(name)
    assert result["type"] == kind
    if storage:
        assert stored(result) == storage, "the run did not have this layout"
    assert_same_run(result, get(reference), start_of(even=reference == "one_even"), controls_of(reference, get))


@newest
@pytest.mark.extended
@pytest.mark.parametrize(
    ("layout", "option"),
    [
        (layout, option)
        for layout, options in (("ddp", WITH_DDP), ("fsdp", OPTIONS))
        for option in options
        if not option.startswith("bf16")
    ],
)
def test_option_equals_one_process(layout: str, option: str, get: Get) -> None:
    reference = "one" if option in ("compile", "checkpointing") else f"one_{option}"
    start = start_of(**OPTIONS[option].get("model", {}))
    assert_same_run(get(f"{layout}_{option}"), get(reference), start, controls_of(reference, get))


@newest
@pytest.mark.extended
def test_ddp_shares_the_work_of_each_step(get: Get) -> None:
    for name in ("ddp", "four_ddp", "ddp_accumulation", *(["ddp_resumed"] if DDP_RESUMES else [])):
        assert get(name)["shared"] == {True}
    for name in ("one", "fsdp"):
        assert get(name)["shared"] == {False}


@pytest.mark.extended
@needs_native[0]
@needs_native[1]
def test_parameters_cut_by_transformers_are_no_replicas(get: Get) -> None:
    for name in ("native_fsdp", "native_tp", "tp", "native_hsdp", "native_fsdp_tp"):
        assert get(name)["shared"] == {False}


@pytest.mark.promise("momentum-offload")
def test_fsdp_that_keeps_parameters_on_the_cpu_changes_nothing(get: Get) -> None:
    assert get("offload")["offload"] == "CPUOffloadPolicy"
    assert_identical(get("offload"), get("fsdp"))
    assert_identical(get("offload_resumed"), get("offload"))


@newest
@pytest.mark.extended
def test_further_fsdp_settings_change_nothing(get: Get) -> None:
    assert_identical(get("fsdp_settings"), get("fsdp"))


# --- mixed precision


@newest
@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("ddp_bf16", "one_bf16"),
        ("fsdp_bf16", "one_bf16"),
        ("ddp_bf16_weights", "one_bf16_weights"),
        # Under mixed precision accelerate gives FSDP2 fp32 weights, which start from rounded values.
        ("fsdp_bf16_weights", "one_bf16_rounded"),
    ],
)
def test_bf16_agrees_within_its_rounding(name: str, reference: str, get: Get) -> None:
    """Bound the distance by that of bf16 from fp32: layouts round gradients differently, Newton-Schulz amplifies it."""
    result, expected = get(name), get(reference)
    assert result["agree"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=5e-3)
    start = start_of(bf16="stored" if reference == "one_bf16_weights" else "rounded" if "weights" in name else "")
    assert distance(result, expected, start) < 4 * distance(get("one_bf16"), get("one"), start_of())


@newest
@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("one_bf16", torch.float32), ("ddp_bf16", torch.float32), ("fsdp_bf16", torch.float32)),
        *(("ddp_bf16_weights", torch.bfloat16), ("fsdp_bf16_weights", torch.float32)),
    ],
)
def test_bf16_keeps_the_momentum_in_fp32(name: str, dtype: torch.dtype, get: Get) -> None:
    result = get(name)
    assert {x.dtype for x in result["weights"].values()} == {dtype}
    moments = {key: x for key, x in result["state"].items() if key.endswith(":momentum_buffer")}
    assert len(moments) == 14
    assert {x.dtype for x in moments.values()} == {torch.float32}


def test_fp16_skips_a_step_on_all_ranks(get: Get) -> None:
    steps = get("fp16")["steps"]
    assert all(step["agree"] for step in steps)
    assert [step["moved"] for step in steps] == [steps[0]["of"], steps[0]["of"], 0, steps[0]["of"]]
    assert [step["scale"] for step in steps] == [2.0**12, 2.0**12, 2.0**11, 2.0**11]


# --- what goes wrong


@pytest.mark.first_tier("fsdp")
@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=newest), "fsdp"])
def test_all_ranks_refuse_a_gradient_that_is_not_finite_on_one(layout: str, stages: Stages) -> None:
    name = f"{layout}_poisoned"
    error = stages.result("two", name)["error"]  # raised by rank 0; the gradient is on the last rank
    assert "model.layers.1.mlp.up_proj.weight (37, 30)" in error
    assert "[gradient-not-finite]" in error


# --- GPUs


def run_on_gpus(cases: list[Case], folder: Path, processes: int) -> None:
    stages = Stages(folder)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    for item in cases:
        item["arguments"] = item.get("arguments", {}) | {"use_cpu": False}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    command = (*launcher, worker.__file__, folder, stages.write(cases))
    python(*command, cwd=folder, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=visible)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_one(tmp_path: Path) -> None:
    """Run on NCCL in place of gloo, with separate streams for FSDP2 and for the exchange of matrices."""
    run_on_gpus([case("one"), moved(case("one"), 0), moved(case("one"), 1)], tmp_path, 1)
    sharded = case("fsdp_sharded", "fsdp2", arguments=SAVE | SHARDED)
    fp16 = case("fp16_trainer", "fsdp2", arguments={"fp16": True})  # through accelerate's scaler
    run_on_gpus([case("ddp"), case("fsdp", "fsdp2"), sharded, resumed(sharded), fp16], tmp_path, 2)
    results = {path.stem: torch.load(path, weights_only=False, map_location="cpu") for path in tmp_path.glob("*.pt")}
    start = start_of()
    for name in ("ddp", "fsdp", "fsdp_sharded"):
        assert results[name]["type"] == ("MULTI_GPU" if name == "ddp" else "FSDP")
        assert_same_run(results[name], results["one"], start, controls_of("one", results.__getitem__))
    assert_identical(results["fsdp_sharded_resumed"], results["fsdp_sharded"])
    assert distance(results["fp16_trainer"], results["one"], start) < 0.1  # fp16 has three more bits than bf16
