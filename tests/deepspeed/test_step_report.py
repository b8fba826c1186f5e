"""`HF_MUON_STEP_REPORT=1` under ZeRO: an entry for each parameter of Muon and of AdamW, as in one process."""

from __future__ import annotations

import pytest

from tests.deepspeed.gradient_cases import reports
from tests.deepspeed.test_training import CPU, STAGES

pytestmark = pytest.mark.usefixtures("quiet")


def entries(report):
    """Return the lines below each name, by their first word."""
    by_name, name = {}, ""
    for line in report.splitlines()[1:]:
        word, _, text = line.strip().partition(" ")
        if line.startswith("    "):
            by_name[name][word] = text.strip().removeprefix("as ").strip()
        else:
            name = line
            by_name[name] = {}
    return by_name


@pytest.mark.extended(but="2-cpu|^3$")
@pytest.mark.parametrize("cell", ["1", "2", "2-cpu", "3", "3-cpu", "3-sub-groups"])
def test_an_entry_for_each_kind_of_both_halves(ranks, cell):
    options = {"stage": 3, "zero": {**CPU, "sub_group_size": 300}} if cell == "3-sub-groups" else STAGES[cell]
    (report,), others = ranks.run(reports, **options)
    assert others == []  # rank 1
    assert report.startswith("the first step of Muon, as rank 0 sees it (2 processes, gloo):")
    entry_of = entries(report)
    assert set(entry_of) == {"first.weight", "last.weight", "branch.weight", "branch.bias"}
    stored = "a slice in a flat ZeRO partition on each of 2 ranks, float32, cpu"
    assert entry_of["first.weight"]["parameter"] == f"(26, 18), {stored}"
    assert entry_of["first.weight"]["seen"] == "rows 20+6"
    assert "slices of ZeRO's partitions travel to one owner of 2 ranks" in entry_of["last.weight"]["step"]
    assert "5 Newton-Schulz steps in float32" in entry_of["last.weight"]["step"]
    assert entry_of["branch.bias"]["step"].startswith("AdamW on the local part")
    assert entry_of["branch.bias"]["parameter"] == f"(26,), {stored}"
    assert entry_of["last.weight"]["gradient"] == "of that partition, float32, cpu"
