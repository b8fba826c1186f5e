"""Sharded checkpoints whose moments are stored in another dtype than this run's."""

from __future__ import annotations

import re

import pytest

from tests.distributed.cases import refusal
from tests.distributed.conftest import run as run
from tests.distributed.test_training import assert_same

SCALES = {"momentum_dtype": "momentum_scale", "adamw_state_dtype": "exp_avg_scale"}


@pytest.mark.parametrize("option", SCALES)
@pytest.mark.parametrize(("there", "here"), [("int8", "fp32"), ("fp32", "int8")])
def test_it_is_read_in_its_own_dtype(pools, run, option, there, here, tmp_path):
    """Expect an error: torch.distributed.checkpoint would read codes into moments of numbers, or vice versa."""
    path, scale = str(tmp_path / "checkpoint"), SCALES[option]
    run("fsdp", 2, last=1, save=path, **{option: there})
    message = f"moments are missing: .*{scale}.*" if there == "int8" else f"Missing key.*{scale}"
    for error in pools[2].run(refusal, case="train", layout="fsdp", first=1, load=path, **{option: here}):
        assert re.search(message, error)


@pytest.mark.extended(but="int8-fp32-False")
@pytest.mark.parametrize("option", SCALES)
@pytest.mark.parametrize(
    ("there", "here", "flat"),
    [
        *(("fp32", "int8", False), ("bf16", "int8", False), ("int8", "fp32", False), ("int8", "bf16", False)),
        ("fp32", "int8", True),
    ],
)
def test_it_is_converted_as_a_whole_state_is(run, option, there, here, flat, tmp_path):
    results = []
    for full in (False, True):
        path = str(tmp_path / f"{full=}")
        run("fsdp", 2, last=2, save=path, full=full, flat=flat and not full, **{option: there})
        resume = {"first": 2, "load": path, "full": full, "flat": flat and not full, "converts": not full}
        results.append(run("fsdp", 2, last=4, **resume, **{option: here}))
    assert_same(*results)


@pytest.mark.extended
@pytest.mark.parametrize("option", SCALES)
def test_codes_of_a_flattened_state_are_not_converted(pools, run, option, tmp_path):
    """Expect an error: torch takes the keys of each parameter's state from the optimizer, which has no scales."""
    path = str(tmp_path / "checkpoint")
    run("fsdp", 2, last=1, save=path, flat=True, **{option: "int8"})
    options = {"case": "train", "layout": "fsdp", "first": 1, "load": path, "flat": True, "converts": True}
    for error in pools[2].run(refusal, **options):
        assert re.search(f"moments are missing: .*{SCALES[option]}", error)
