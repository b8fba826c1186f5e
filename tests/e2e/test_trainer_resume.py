"""Checkpoints of Trainer with `optim: muon`: resumed in every layout and on other numbers of processes.

`test_trainer_layouts.py` compares the runs themselves with one process.
"""

from __future__ import annotations

import pytest

from tests.e2e.layout_cases import (
    ddp_resumes,
    loads_shards,
    needs_parallelism,
    newest,
)
from tests.e2e.layout_stages import Get, Stages, assert_identical, assert_same_run, controls_of, distance, start_of

pytestmark = pytest.mark.slow


@pytest.mark.promise("tensor-parallel", "exact-resume")
@pytest.mark.first_tier("^(one|ddp|fsdp|fsdp_sharded|launched|hsdp)$")
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


@pytest.mark.newest
@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param("ddp", marks=ddp_resumes), "fsdp"])
def test_that_comparison_fails_without_the_moments(name: str, get: Get) -> None:
    dropped, straight = get(f"{name}_dropped"), get(name)
    with pytest.raises(AssertionError):
        assert_identical(dropped, straight)
    assert distance(dropped, straight, start_of()) > 0.1


@pytest.mark.promise("other-layout")
@pytest.mark.first_tier("two_to_four_sharded")
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=newest) for name in ("two_to_four", "four_to_two", "two_to_one")),
        *(pytest.param(name, marks=loads_shards) for name in ("two_to_four_sharded", "four_to_two_sharded")),
        *(pytest.param(x, marks=needs_parallelism) for x in ("two_to_hsdp_sharded", "hsdp_to_two_sharded")),
    ],
)
def test_resumed_run_on_another_number_of_processes(name: str, get: Get) -> None:
    assert_same_run(get(name), get("one"), start_of(), controls_of("one", get))


@pytest.mark.extended
@pytest.mark.llamafactory  # whose stack has such an accelerate
def test_moments_that_accelerate_forgets_are_missed(stages: Stages) -> None:
    error = stages.result("two", "fsdp_sharded_resumed")["error"]
    assert "This optimizer state cannot be loaded, and nothing was changed" in error
    assert "moments are missing" in error
    assert "cannot load them again" in stages.run("two")
