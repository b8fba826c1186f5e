"""Checkpoints of Trainer with `optim: muon`: resumed in every layout, on other numbers of processes, and damaged.

`test_trainer_layouts.py` compares the runs themselves with one process.
"""

from __future__ import annotations

import re

import pytest

from hf_muon.rules.normalize import SECOND_MOMENT
from tests.e2e import layouts_worker as worker
from tests.e2e.layout_cases import (
    LACKING,
    LOADS_SHARDS,
    ddp_resumes,
    loads_shards,
    needs_context_parallel,
    needs_native,
    needs_parallelism,
)
from tests.e2e.layout_stages import Get, Stages, assert_identical, assert_same_run, controls_of, distance, start_of

pytestmark = pytest.mark.slow


@pytest.mark.extended(but="^(one|ddp|fsdp|fsdp_sharded|launched|hsdp|native_tp|cp)$")
@pytest.mark.parametrize(
    "name",
    [
        *("one", "fsdp", "launched"),
        pytest.param("ddp", marks=ddp_resumes),
        pytest.param("hsdp", marks=needs_parallelism),
        *(pytest.param(name, marks=loads_shards) for name in ("fsdp_sharded", "fsdp_lora")),
        *(pytest.param(name, marks=needs_native) for name in ("native_fsdp", "native_tp", "native_fsdp_tp")),
        pytest.param("cp", marks=needs_context_parallel),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(name: str, get: Get) -> None:
    assert_identical(get(f"{name}_resumed"), get(name))


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param("ddp", marks=ddp_resumes), "fsdp"])
def test_that_comparison_fails_without_the_moments(name: str, get: Get) -> None:
    dropped, straight = get(f"{name}_dropped"), get(name)
    with pytest.raises(AssertionError):
        assert_identical(dropped, straight)
    assert distance(dropped, straight, start_of()) > 0.1


@pytest.mark.extended(but="two_to_four_sharded")
@pytest.mark.parametrize(
    "name",
    [
        *("two_to_four", "four_to_two", "two_to_one"),
        *(pytest.param(name, marks=loads_shards) for name in ("two_to_four_sharded", "four_to_two_sharded")),
        *(pytest.param(x, marks=needs_parallelism) for x in ("two_to_hsdp_sharded", "hsdp_to_two_sharded")),
    ],
)
def test_resumed_run_on_another_number_of_processes(name: str, get: Get) -> None:
    assert_same_run(get(name), get("one"), start_of(), controls_of("one", get))


@loads_shards
@pytest.mark.extended(but="on")
@pytest.mark.parametrize("switched", ["on", "off"])
def test_a_rule_is_switched_with_shards_as_with_a_whole_state(switched: str, get: Get) -> None:
    result = get(f"rule_{switched}_shards")
    assert_identical(result, get(f"rule_{switched}_whole"))
    assert any(name.endswith(f":{SECOND_MOMENT}") for name in result["state"]) is (switched == "on")


@pytest.mark.extended
@needs_native
@pytest.mark.parametrize("name", ["tp_to_ddp", "tp_to_fsdp_tp", "ddp_to_native_fsdp"])
def test_model_sharded_while_loading_resumes_in_another_layout(name: str, get: Get) -> None:
    reference = "one" if name == "ddp_to_native_fsdp" else "one_even"
    assert_same_run(get(name), get(reference), start_of(even=reference == "one_even"), controls_of(reference, get))


@pytest.mark.extended
@needs_native
def test_other_optimizers_of_a_model_sharded_while_loading_are_left_to_trainer(stages: Stages) -> None:
    """Trainer would save rank 0's shard of the moments as if it were whole."""
    assert "Resuming is not supported for models sharded at load time" in stages.result("two", "native_adamw")["error"]


@pytest.mark.extended
@pytest.mark.skipif(LOADS_SHARDS, reason="accelerate loads sharded moments")
def test_moments_that_accelerate_forgets_are_missed(stages: Stages) -> None:
    error = stages.result("two", "fsdp_sharded_resumed")["error"]
    assert "This optimizer state cannot be loaded, and nothing was changed" in error
    assert "moments are missing" in error
    assert "cannot load them again" in stages.run("two")


@pytest.mark.extended
def test_damaged_checkpoint_is_named_with_the_one_before_it(stages: Stages) -> None:
    error = stages.result("damaged", "damaged_ddp")["error"]
    folder = stages.folder / "damaged_ddp"
    assert f"This checkpoint is damaged: {folder}/checkpoint-{worker.SAVE_STEP + 1}/optimizer.pt is cut off" in error
    assert f"the one before it, {folder}/checkpoint-{worker.SAVE_STEP}, and remove this one" in error


@pytest.mark.extended
def test_damaged_checkpoint_that_one_rank_reads(stages: Stages) -> None:
    printed = stages.run("damaged")  # rank 0 alone reads a full state dict
    damaged = stages.folder / "damaged_fsdp" / f"checkpoint-{worker.SAVE_STEP + 1}" / "optimizer.bin"
    assert f"RuntimeError: This checkpoint is damaged: {damaged} is cut off" in printed


@pytest.mark.extended
def test_whole_state_that_lacks_a_moment_is_refused(stages: Stages) -> None:
    error = stages.result("damaged", "lacking_fsdp")["error"]
    assert re.search(rf"moments are missing: {re.escape(LACKING)} \(.*\) lacks \['momentum_buffer'\]", error)


@pytest.mark.extended
def test_checkpoint_before_a_damaged_one_resumes(get: Get) -> None:
    assert_identical(get("undamaged"), get("fsdp"))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddp_to_fsdp", "has no state dict of FSDP, and a run with FSDP and FULL_STATE_DICT cannot resume from it"),
        ("fsdp_to_ddp", "has a FULL_STATE_DICT of FSDP, and a run without FSDP cannot resume from it"),
        ("shards_to_whole", "has a SHARDED_STATE_DICT of FSDP, and a run with FSDP and FULL_STATE_DICT cannot resume"),
    ],
)
def test_checkpoints_of_another_kind_are_refused_on_all_ranks(name: str, message: str, stages: Stages) -> None:
    """If one rank raised this alone, the other would wait, and the cases after this one could not run."""
    assert message in stages.result("two", name)["error"]
