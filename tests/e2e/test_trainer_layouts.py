"""Trainer with `optim: muon` in the layouts it knows, against the same Trainer in one process with the same batches.

Real processes on gloo; `cpu_fsdp` opens FSDP2 on a CPU. Each layout is compared with one process and resumed from its
checkpoint; `tests/equality` has options, dtypes and refused steps in every layout, without Trainer.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.e2e import layouts_worker as worker
from tests.e2e.harness import ROOT, python
from tests.e2e.layout_cases import (
    DDP_RESUMES,
    STARTS,
    Runs,
    assert_identical,
    assert_same_run,
    ddp_resumes,
    distance,
    loads_shards,
    needs_native,
    needs_parallelism,
    start_of,
)

pytestmark = pytest.mark.slow

PLAIN, FSDP2 = "Tensor  torch.float32", "DTensor (Shard(dim=0),) torch.float32"
HSDP2 = "DTensor (Replicate(), Shard(dim=0)) torch.float32"
TENSOR_PARALLEL = {PLAIN, FSDP2, FSDP2.replace("0", "1", 1)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("layouts"))


def test_one_process_learns_and_resumes(runs):
    losses = runs("one")["losses"]
    assert losses[worker.STEPS] < 0.95 * losses[1]
    assert_resumes("one", runs)


def assert_resumes(name, runs):
    assert_identical(runs(f"{name}_resumed"), runs(name))


@pytest.mark.extended
@pytest.mark.second_tier("fsdp")
@pytest.mark.parametrize("name", [pytest.param("ddp", marks=ddp_resumes), "fsdp"])
def test_that_comparison_fails_without_the_moments(name, runs):
    dropped, straight = runs(f"{name}_dropped"), runs(name)
    with pytest.raises(AssertionError):
        assert_identical(dropped, straight)
    assert distance(dropped, straight, start_of()) > 0.1


@pytest.mark.promise("ddp", "fsdp2", "hsdp", "tensor-parallel", "exact-resume")
@pytest.mark.first_tier("^(ddp|fsdp)-")
@pytest.mark.second_tier("^(ddp|fsdp|launched|hsdp|tp|native_fsdp_tp)-")
@pytest.mark.parametrize(
    ("name", "kind", "storage"),
    [
        ("ddp", "MULTI_CPU", {PLAIN}),
        ("fsdp", "FSDP", {FSDP2}),
        ("fsdp_sharded", "FSDP", {FSDP2}),
        ("launched", "FSDP", {FSDP2}),
        pytest.param("hsdp", "FSDP", {HSDP2}, marks=needs_parallelism),
        pytest.param("tp", "MULTI_CPU", TENSOR_PARALLEL, marks=needs_parallelism),
        pytest.param("native_fsdp", "MULTI_CPU", {FSDP2}, marks=needs_native),
        pytest.param("native_tp", "MULTI_CPU", TENSOR_PARALLEL, marks=needs_native),
        pytest.param("native_hsdp", "MULTI_CPU", {HSDP2}, marks=needs_native),
        pytest.param("native_fsdp_tp", "MULTI_CPU", set(), marks=needs_native),
    ],
)
def test_layout_equals_one_process_and_resumes(name, kind, storage, runs):
    result = runs(name)
    assert result["type"] == kind
    assert not storage or result["stored"] == storage, "the run did not have this layout"
    assert result["shared"] == {name == "ddp"}, "replicas, and nothing else, share the work of each step"
    assert_same_run(name, "one_even" if STARTS[name].model else "one", runs)
    if STARTS[name].resumes:
        assert_resumes(name, runs)


@pytest.mark.extended
@pytest.mark.second_tier("ddp-lora|fsdp-together")
@pytest.mark.parametrize("option", ["together", pytest.param("lora", marks=loads_shards)])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_options_equal_one_process_and_resume(layout, option, runs):
    name = f"{layout}_{option}"
    assert_same_run(name, f"one_{option}", runs)
    if STARTS[name].resumes:
        assert_resumes(name, runs)


@pytest.mark.extended
def test_fsdp_that_keeps_parameters_on_the_cpu_changes_nothing(runs):
    assert runs("offload")["offload"] == "CPUOffloadPolicy"
    assert_identical(runs("offload"), runs("fsdp"))
    assert_resumes("offload", runs)


@pytest.mark.extended
def test_further_fsdp_settings_change_nothing(runs):
    assert_identical(runs("fsdp_settings"), runs("fsdp"))


@pytest.mark.extended
@pytest.mark.second_tier("two_to_(one|four_sharded)|hsdp_to_two")
@pytest.mark.parametrize(
    "name",
    [
        "two_to_four",
        "two_to_one",
        pytest.param("two_to_four_sharded", marks=loads_shards),
        *(pytest.param(x, marks=needs_parallelism) for x in ("two_to_hsdp_sharded", "hsdp_to_two_sharded")),
    ],
)
def test_resumed_run_on_another_number_of_processes(name, runs):
    assert_same_run(name, "one", runs)


@pytest.mark.extended
@pytest.mark.llamafactory  # whose stack has such an accelerate
def test_moments_that_accelerate_forgets_are_missed(runs):
    printed = runs.start("fsdp_forgotten", fails=True)
    assert "This optimizer state cannot be loaded, and nothing was changed" in printed
    assert "moments are missing" in printed
    assert "cannot load them again" in printed


@pytest.mark.extended
@pytest.mark.second_tier("^(fsdp_bf16|ddp_bf16_weights)-")
@pytest.mark.parametrize(
    ("name", "reference", "stored"),
    [
        ("ddp_bf16", "one_bf16", torch.float32),
        ("fsdp_bf16", "one_bf16", torch.float32),
        ("ddp_bf16_weights", "one_bf16_weights", torch.bfloat16),
        # Under mixed precision accelerate gives FSDP2 fp32 weights, which start from rounded values.
        ("fsdp_bf16_weights", "one_bf16_rounded", torch.float32),
    ],
)
def test_bf16_agrees_within_its_rounding_and_resumes(name, reference, stored, runs):
    """Bound the distance by that of bf16 from fp32: layouts round gradients differently, Newton-Schulz amplifies it."""
    result, expected = runs(name), runs(reference)
    assert result["agree"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=5e-3)
    start = start_of(**STARTS[reference].model)
    assert distance(result, expected, start) < 4 * distance(runs("one_bf16"), runs("one"), start_of())
    assert {x.dtype for x in result["weights"].values()} == {stored}
    moments = [x.dtype for key, x in result["state"].items() if key.endswith(":momentum_buffer")]
    assert moments == [torch.float32] * 14
    if STARTS[name].resumes:
        assert_resumes(name, runs)


def test_fp16_skips_a_step_on_all_ranks(runs):
    steps = runs("fp16")["steps"]
    assert all(step["agree"] for step in steps)
    assert [step["moved"] for step in steps] == [1, 1, 0, 1]
    assert [step["scale"] for step in steps] == [2.0**12, 2.0**12, 2.0**11, 2.0**11]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_one(runs):
    """Run on NCCL in place of gloo, with separate streams for FSDP2 and for the exchange of matrices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    for name, more in (("one", {}), ("ddp", {}), ("fsdp", {}), ("fsdp_sharded", {}), ("fsdp_settings", {"fp16": True})):
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", STARTS[name].ranks)
        command = (*launcher, worker.__file__, runs.folder, runs.write(name, use_cpu=False, **more))
        python(*command, cwd=runs.folder, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=visible)
    for name in ("ddp", "fsdp", "fsdp_sharded"):
        assert runs(name)["type"] == ("MULTI_GPU" if name == "ddp" else "FSDP")
        assert_same_run(name, "one", runs)
        if name != "ddp" or DDP_RESUMES:
            assert_resumes(name, runs)
    # Through accelerate's scaler; fp16 has three more bits than bf16.
    assert distance(runs("fsdp_settings"), runs("one"), start_of()) < 0.1
