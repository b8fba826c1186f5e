"""When a rank dies, hangs or fails, the others raise an error, and the previous checkpoint resumes bit for bit."""

from __future__ import annotations

import random

import pytest

from tests.chaos.ranks import RANKS, Fault, run

pytestmark = pytest.mark.slow

# Seconds. Only a rank that was stopped, and does not end, is waited for so long.
TIMEOUTS = {"stopped": 8.0, "killed": 60.0, "out of memory": 60.0, "disk full": 60.0}
LAYOUTS = {"ddp": {"form": "full"}, "fsdp": {}}  # DDP saves one file, from rank 0; FSDP2 one file per rank
CASES = [
    *((kind, phase) for kind in ("killed", "stopped", "out of memory") for phase in ("step", "save", "load")),
    ("disk full", "save"),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return, by layout, the results of uninterrupted runs of six steps, and checkpoints of the same after four."""
    runs = {}
    for layout, how in LAYOUTS.items():
        good = str(tmp_path_factory.mktemp("checkpoints") / layout)
        assert all(isinstance(result, dict) for result in run(layout, last=4, save=good, **how))
        runs[layout] = run(layout, last=6), good
    return runs


@pytest.mark.first_tier("killed-save-fsdp")
@pytest.mark.second_tier("killed-(step-ddp|save-fsdp|load-fsdp)|stopped-step-ddp|full-save-fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_the_others_end_and_the_checkpoint_before_resumes(straight, layout, kind, phase, tmp_path):
    """Expect every rank but a stopped one to end by itself: `run` kills what hangs, and says so."""
    expected, good = straight[layout]
    # In DDP rank 0 alone writes the checkpoint.
    victim = 0 if (layout, phase) == ("ddp", "save") else 1
    options = {"first": 4, "last": 6, "load": good, **LAYOUTS[layout]}
    results = run(layout, Fault(kind, phase, victim), timeout=TIMEOUTS[kind], save=str(tmp_path / "6"), **options)
    signs = {"killed": "SIGKILL", "stopped": "stopped", "out of memory": "memory", "disk full": "No space left"}
    assert signs[kind] in results[victim]
    assert results[1 - victim].startswith("Traceback"), results[1 - victim]
    if phase == "save":  # no later run takes the half-written files for a checkpoint
        broken = run(layout, timeout=TIMEOUTS[kind], **{**options, "load": str(tmp_path / "6")})
        assert all(isinstance(result, str) and "Traceback" in result for result in broken)
    assert run(layout, **options) == expected[:1] * RANKS


@pytest.mark.extended
@pytest.mark.second_tier("fsdp-0")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_that_save_and_are_killed_are_the_uninterrupted_run(layout, seed, tmp_path):
    """Go on from the last checkpoint, or be killed in a step or while a rank saves, in an order drawn from the seed."""
    draw = random.Random(seed)
    saved, last = "", None
    for step in range(3):
        options = {"first": step, "last": step + 1, "load": saved, **LAYOUTS[layout]}
        if draw.random() < 0.7:
            phase, rank = draw.choice(["step", "save"]), draw.randrange(RANKS)
            rank = 0 if (layout, phase) == ("ddp", "save") else rank
            fault = Fault("killed", phase, rank)
            results = run(layout, fault, timeout=TIMEOUTS["killed"], save=str(tmp_path / f"lost-{step}"), **options)
            assert results[rank] == "SIGKILL"
        saved = str(tmp_path / str(step))
        last = run(layout, save=saved, **options)
        assert last[0] == last[1]
    assert run(layout, last=3) == last
