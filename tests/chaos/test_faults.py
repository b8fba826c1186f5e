"""When a rank dies, hangs or fails, the others raise an error, and the previous checkpoint resumes bit for bit."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.chaos.ranks import RANKS, Fault, run

pytestmark = pytest.mark.slow

GROUP_TIMEOUT = 8.0
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


@pytest.mark.first_tier("killed-step-ddp|killed-save-fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_the_others_end_and_the_checkpoint_before_resumes(straight, layout, kind, phase, tmp_path):
    """Expect every rank but a stopped one to end by itself: `run` kills what hangs, and says so."""
    expected, good = straight[layout]
    # In DDP rank 0 alone writes the checkpoint.
    victim = 0 if (layout, phase) == ("ddp", "save") else 1
    options = {"first": 4, "last": 6, "load": good, **LAYOUTS[layout]}
    results = run(layout, Fault(kind, phase, victim), timeout=GROUP_TIMEOUT, save=str(tmp_path / "6"), **options)
    signs = {"killed": "SIGKILL", "stopped": "stopped", "out of memory": "memory", "disk full": "No space left"}
    assert signs[kind] in results[victim]
    assert results[1 - victim].startswith("Traceback"), results[1 - victim]
    if phase == "save":  # no later run takes the half-written files for a checkpoint
        broken = run(layout, timeout=GROUP_TIMEOUT, **{**options, "load": str(tmp_path / "6")})
        assert all(isinstance(result, str) and "Traceback" in result for result in broken)
    assert run(layout, **options) == expected[:1] * RANKS


FEW = settings(max_examples=3, stateful_step_count=6, deadline=None, suppress_health_check=list(HealthCheck))


class Interrupted(RuleBasedStateMachine):
    """A run that goes on from its last checkpoint: it saves, it is killed in a step or while it saves."""

    layout = ""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.step, self.saved, self.last = 0, "", None

    def options(self, **more):
        return {"first": self.step, "last": self.step + 1, "load": self.saved, **LAYOUTS[self.layout], **more}

    @rule()
    def goes_on(self):
        path = f"{self.folder.name}/{self.step}"
        self.last, other = run(self.layout, **self.options(save=path))
        assert self.last == other
        self.saved, self.step = path, self.step + 1

    @precondition(lambda self: self.step)
    @rule(phase=st.sampled_from(["step", "save"]), rank=st.integers(0, RANKS - 1))
    def is_killed(self, phase, rank):
        rank = 0 if self.layout == "ddp" and phase == "save" else rank  # which alone writes there
        lost = self.options(save=f"{self.folder.name}/lost-{phase}-{rank}-{self.step}")
        results = run(self.layout, Fault("killed", phase, rank), timeout=GROUP_TIMEOUT, **lost)
        assert results[rank] == "SIGKILL"

    def teardown(self):
        if self.last is not None:
            assert run(self.layout, last=self.step)[0] == self.last
        self.folder.cleanup()


@pytest.mark.extended
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_that_save_and_are_killed_are_the_uninterrupted_run(layout):
    machine = type("Machine", (Interrupted,), {"layout": layout})
    run_state_machine_as_test(machine, settings=FEW)
