"""Checkpoints of Trainer with `optim: muon`: resumed in every layout and on other numbers of processes.

`test_trainer_layouts.py` compares the runs themselves with one process.
"""

from __future__ import annotations

import re

import pytest

from hf_muon.rules.normalize import SECOND_MOMENT
from tests.e2e.layout_cases import (
    LACKING,
    LOADS_SHARDS,
    ddp_resumes,
    loads_shards,
    needs_parallelism,
)
from tests.e2e.layout_stages import Get, Stages, assert_identical, assert_same_run, controls_of, distance, start_of

pytestmark = pytest.mark.slow


@pytest.mark.extended(but="^(one|ddp|fsdp|fsdp_sharded|launched|hsdp)$")
@pytest.mark.parametrize(
    "name",
    [
        *("one", "fsdp", "launched"),
        pytest.param("ddp", marks=ddp_resumes),
        pytest.param("hsdp", marks=needs_parallelism),
        *(pytest.param(name, marks=loads_shards) for name in ("fsdp_sharded", "fsdp_lora")),
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
@pytest.mark.skipif(LOADS_SHARDS, reason="accelerate loads sharded moments")
def test_moments_that_accelerate_forgets_are_missed(stages: Stages) -> None:
    error = stages.result("two", "fsdp_sharded_resumed")["error"]
    assert "This optimizer state cannot be loaded, and nothing was changed" in error
    assert "moments are missing" in error
    assert "cannot load them again" in stages.run("two")


@pytest.mark.extended
def test_whole_state_that_lacks_a_moment_is_refused(stages: Stages) -> None:
    error = stages.result("lacking", "lacking_fsdp")["error"]
    assert re.search(rf"moments are missing: {re.escape(LACKING)} \(.*\) lacks \['momentum_buffer'\]", error)
