"""When a rank dies, hangs or fails, the others raise an error, and the previous checkpoint resumes bit for bit."""

from __future__ import annotations

import time

import pytest
import torch

from tests.chaos.faults import Fault
from tests.chaos.ranks import RANKS, run

pytestmark = pytest.mark.slow

GROUP_TIMEOUT = 8.0
LAYOUTS = {"ddp": {"full": True}, "fsdp": {}}  # DDP saves one file, from rank 0; FSDP2 one file per rank
CASES = [
    *((kind, phase) for kind in ("killed", "stopped", "out of memory") for phase in ("step", "save", "load")),
    ("disk full", "save"),
]


def assert_equal(one, other):
    """Compare weights and moments bit for bit."""
    assert isinstance(one, dict), one
    assert one["states"].keys() == other["states"].keys()
    for name, state in other["states"].items():
        assert one["states"][name].keys() == state.keys()
        assert [key for key, value in state.items() if not torch.equal(one["states"][name][key], value)] == [], name


@pytest.fixture(scope="module")
def straight():
    """Return uninterrupted runs of six steps, by layout."""
    return {layout: run(layout, last=6)[0] for layout in LAYOUTS}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return checkpoints of the same runs after four steps, by layout."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout, how in LAYOUTS.items():
        assert all(isinstance(result, dict) for result in run(layout, last=4, save=str(folder / layout), **how))
    return {layout: str(folder / layout) for layout in LAYOUTS}


@pytest.mark.extended(but="killed-step-ddp|killed-save-fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_the_others_end_and_the_checkpoint_before_resumes(straight, checkpoints, layout, kind, phase, tmp_path):
    how, good = LAYOUTS[layout], checkpoints[layout]
    # In DDP rank 0 alone writes the checkpoint.
    victim = 0 if (layout, phase) == ("ddp", "save") else 1
    options = {"first": 4, "last": 6, "load": good, **how}
    start = time.monotonic()
    results = run(layout, Fault(kind, phase, victim), timeout=GROUP_TIMEOUT, save=str(tmp_path / "6"), **options)
    other = results[1 - victim]
    signs = {"killed": "SIGKILL", "stopped": "stopped", "out of memory": "memory", "disk full": "No space left"}
    assert signs[kind] in results[victim]
    if (layout, phase) == ("ddp", "save"):
        assert isinstance(other, dict), "this rank does not write the file"
    else:
        assert other.startswith("Traceback"), other
        assert time.monotonic() - start < 3 * GROUP_TIMEOUT + 30
    if phase == "save":  # no later run takes the half-written files for a checkpoint
        broken = run(layout, timeout=GROUP_TIMEOUT, **{**options, "load": str(tmp_path / "6")})
        assert all(isinstance(result, str) and "Traceback" in result for result in broken)
    for result in run(layout, **options):
        assert_equal(result, straight[layout])


@pytest.mark.extended
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_rounds_of_save_kill_and_resume_are_the_uninterrupted_run(layout, tmp_path):
    rounds, how = 20, LAYOUTS[layout]
    load = None
    for step in range(rounds):
        path = str(tmp_path / str(step))
        # The run goes on and dies in the next step or while it saves, on alternating ranks.
        fault = Fault("killed", ("step", "save")[step % 2], 0 if layout == "ddp" else step // 2 % RANKS)
        later = {"first": step + 1, "last": step + 2, "load": path, "save": str(tmp_path / "lost"), **how}
        saved = run(layout, fault, first=step, last=step + 1, load=load, save=path, later=later, **how)
        assert all(isinstance(result, dict) for result in saved), saved
        load = path
    for result, expected in zip(saved, run(layout, last=rounds), strict=True):
        assert_equal(result, expected)
