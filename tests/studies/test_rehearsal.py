"""The rest of the table of what a step asks of an accelerator, and the counting behind it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import rehearsal
from benchmarks.count import counting
from benchmarks.rehearsal_table import ADVICE, CASES, README, Case, differences, readme_lines, readme_with
from hf_muon.math import elementwise
from tests.test_rehearsal import FIRST, TABLE


@pytest.mark.extended
@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST], ids=str)
def test_the_rest_of_the_table_is_what_a_step_takes(case):
    if lines := differences(case, rehearsal.rehearse(case), TABLE.get(case)):
        pytest.fail("\n".join([*lines, ADVICE]), pytrace=False)


def test_the_table_has_every_case_once_and_the_readme_shows_it():
    assert list(TABLE) == CASES
    assert set(FIRST) <= set(CASES)
    text = README.read_text()
    assert readme_with(text, readme_lines(TABLE)) == text


def test_a_difference_is_a_line_that_says_what_changed():
    case = Case(layout="FSDP2", ranks=8)
    figures = dataclasses.replace(TABLE[case], launches=TABLE[case].launches + 7)
    (line,) = differences(case, figures, TABLE[case])
    old, new = (f"{number:g}" for number in (TABLE[case].launches, figures.launches))
    assert line == f"launches of Qwen3-0.6B, FSDP2 on 8, bf16 weights, fp32 moments, bf16 products: {old} -> {new}"
    assert differences(case, figures, None) == [f"{case}: not in the table"]


def test_views_and_allocations_are_free():
    with counting() as count:
        torch.empty(4, 6, device="meta").view(24)[3:].t().unsqueeze(0)
    assert not count.launches


def test_in_place_reads_and_writes():
    a, b = torch.empty(10, device="meta"), torch.empty(10, device="meta", dtype=torch.bfloat16)
    with counting() as count:
        a.add_(b)
        a.copy_(b)
    assert dict(count.launches) == {"add": 1, "copy": 1}
    assert dict(count.traffic) == {"add": 40 + 20 + 40, "copy": 20 + 40}


def test_a_multi_tensor_call_is_one_launch_if_torch_has_a_kernel_for_it():
    a, b = ([torch.empty(4, 6, device="meta") for _ in range(3)] for _ in range(2))
    with counting() as count:
        torch._foreach_copy_(a, b)
    assert count.launches["_foreach_copy"] == 1
    assert count.traffic["_foreach_copy"] == 3 * 2 * 24 * 4
    with counting() as count:
        torch._foreach_copy_(a, [tensor.view(6, 4).mT for tensor in b])
    assert count.launches["_foreach_copy"] == 3


def test_waits_are_reads_and_copies_that_block():
    a, here = torch.empty(2, 3, device="meta"), torch.empty(2, 3)
    with counting() as count:
        assert a[0, 0].item() == 0
        assert (a > 0).tolist() == [[True] * 3] * 2
        assert bool((a > 0).all())
    assert dict(count.waits) == {"item": 2, "copy to the host": 1}
    with counting() as count:
        a.copy_(here)
        here.copy_(a)
        here.to("meta")
        a.cpu()
    assert dict(count.waits) == {"copy to the device": 2, "copy to the host": 2}
    assert count.host_bytes == count.traffic.total() == 4 * 24
    with counting() as count:
        a.copy_(here, non_blocking=True)
        here.copy_(a, non_blocking=True)
        a.to("cpu", non_blocking=True)
        torch.empty(0).to("meta")
    assert not count.waits
    assert count.launches.total() == 4  # torch copies nothing for the last one


def test_compiled_functions_copy_tensors_that_are_not_aligned():
    flat = torch.empty(100, device="meta")
    add = elementwise.Elementwise(lambda a, b: a.add_(b), reads=(0, 1), writes=(0,))
    with counting() as count:
        add(flat[4:20], flat[40:56])
        add(flat[1:17], flat[40:56])  # copied, and copied back
    assert sorted(count.launches.values()) == [2, 2]
    assert count.traffic["clone"] == 4 * 64


def test_products_are_no_elementwise_traffic():
    with counting() as count:
        torch.empty(2, 4, 6, device="meta") @ torch.empty(2, 6, 4, device="meta")
    assert count.launches["bmm"] == 1
    assert not count.traffic


def test_a_product_copies_an_addend_that_is_not_its_output():
    a, b = (torch.empty(2, 4, 4, device="meta") for _ in range(2))
    row = torch.empty(4, device="meta")
    with counting() as count:
        torch.baddbmm(a, b, b, out=a)
        a.baddbmm_(b, b)
        torch.baddbmm(b, b, b, beta=0, out=a)
        torch.addmm(a[0], b[0], b[0], out=a[0])
    assert dict(count.launches) == {"baddbmm": 3, "addmm": 1}
    with counting() as count:
        torch.baddbmm(a, b, b, out=torch.empty_like(b))
        torch.addmm(row, b[0], b[0])
    assert dict(count.traffic) == {"copy inside": 2 * 4 * 32 + 4 * (4 + 16)}
    assert count.launches["copy inside"] == 2
    assert count.products == 2


def test_a_reduction_in_a_wider_dtype_converts_its_input_first():
    a = torch.empty(3, 8, device="meta")
    with counting() as count:
        a.sum(dtype=torch.float64)
        torch.linalg.vector_norm(a, dtype=torch.float32)
        torch.linalg.vector_norm(a.bfloat16(), dtype=torch.float32)
    assert count.launches["copy inside"] == 1
    assert count.traffic["copy inside"] == 24 * (8 + 8)


def test_what_is_copied_inside_is_what_torch_copies():
    """Operators that CPUs and CUDA share: what a profiler sees."""
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
