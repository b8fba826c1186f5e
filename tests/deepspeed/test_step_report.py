"""`HF_MUON_STEP_REPORT=1` under ZeRO: an entry for each parameter of both halves, as in one process."""

from __future__ import annotations

import pytest

from tests.deepspeed.gradient_cases import reported
from tests.deepspeed.test_training import CPU, STAGES


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """DeepSpeed's use of what torch has deprecated is not ours to judge."""


def entries(report):
    """The lines below each name."""
    found, name = {}, ""
    for line in report.splitlines()[1:]:
        word, _, text = line.strip().partition(" ")
        if line.startswith("    "):
            found[name][word] = text.strip().removeprefix("as ").strip()
        else:
            name = line
            found[name] = {}
    return found


@pytest.mark.extended(but="2-cpu|^3$")
@pytest.mark.parametrize("cell", ["1", "2", "2-cpu", "3", "3-cpu", "3-sub-groups"])
def test_an_entry_for_each_kind_of_both_halves(ranks, cell):
    options = {"stage": 3, "zero": {**CPU, "sub_group_size": 300}} if cell == "3-sub-groups" else STAGES[cell]
    (report,), others = ranks.run(reported, **options)
    assert others == []  # rank 1
    assert report.startswith("the first step of Muon, as rank 0 sees it (2 processes, gloo):")
    found = entries(report)
    assert set(found) == {"first.weight", "last.weight", "branch.weight", "branch.bias"}
    stored = "a slice in a flat ZeRO partition on each of 2 ranks, float32, cpu"
    assert found["first.weight"]["parameter"] == f"(26, 18), {stored}"
    assert found["first.weight"]["seen"] == "rows 20+6"
    assert "slices of ZeRO's partitions travel to one owner of 2 ranks" in found["last.weight"]["step"]
    assert "5 Newton-Schulz steps in float32" in found["last.weight"]["step"]
    assert found["branch.bias"]["step"].startswith("AdamW on the local part")
    assert found["branch.bias"]["parameter"] == f"(26,), {stored}"
    assert found["last.weight"]["gradient"] == "a slice of the gradient of that partition, float32, cpu"
    if cell in ("2-cpu", "3-cpu"):  # elsewhere DeepSpeed has written zeros
        assert found["branch.bias"]["gradient"] == "none"
