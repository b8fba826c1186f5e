"""The rest of the table of what a step asks of an accelerator, and the counting behind it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import rehearsal
from benchmarks.count import counting
from benchmarks.rehearsal_table import ADVICE, CASES, README, Case, differences, readme_lines, readme_with
from tests.test_rehearsal import FIRST, TABLE


@pytest.mark.extended
@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST], ids=str)
def test_the_rest_of_the_table_is_what_a_step_takes(case):
    if lines := differences(case, rehearsal.rehearse(case), TABLE.get(case)):
        pytest.fail("\n".join([*lines, ADVICE]), pytrace=False)


def test_the_table_has_every_case_once_the_readme_shows_it_and_a_difference_says_what_changed():
    assert list(TABLE) == CASES
    assert set(FIRST) <= set(CASES)
    text = README.read_text()
    assert readme_with(text, readme_lines(TABLE)) == text
    case = Case(layout="FSDP2", ranks=8)
    figures = dataclasses.replace(TABLE[case], launches=TABLE[case].launches + 7)
    (line,) = differences(case, figures, TABLE[case])
    old, new = (f"{number:g}" for number in (TABLE[case].launches, figures.launches))
    assert line == f"launches of Qwen3-0.6B, FSDP2 on 8, bf16 weights, fp32 moments, bf16 products: {old} -> {new}"
    assert differences(case, figures, None) == [f"{case}: not in the table"]


def test_what_is_copied_inside_is_what_torch_copies():
    """Operators that CPUs and CUDA share: what a profiler sees. What else is counted shows in each row of the table."""
    x = torch.randn(4, 16, 16)
    for call in (
        lambda t, out: torch.baddbmm(t, t, t, beta=0.5, out=out),
        lambda t, out: torch.baddbmm(t, t, t, beta=0, out=out),
        lambda t, out: torch.bmm(t, t, out=out),
        lambda t, out: torch.linalg.vector_norm(t, dim=(-2, -1), dtype=torch.float64),
        lambda t, out: torch.linalg.vector_norm(t, dim=(-2, -1)),
    ):
        with counting() as count:
            call(x.to("meta"), torch.empty_like(x, device="meta"))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call(x, torch.empty_like(x))
        copies = sum(event.name == "aten::copy_" for event in profile.events())
        assert copies == count.launches["copy inside"]
