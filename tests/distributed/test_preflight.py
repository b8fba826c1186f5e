"""A fault on one rank: all ranks raise the same error, nothing hangs, nothing changes."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.agreement_cases import complaint, gradients_missing_on_one_rank, idle, unequal

REPLICAS = r"parameter 1 \(10, 16\) has a gradient on rank .* and none on rank 1, .*find_unused_parameters=True"
CASES = [
    ("ddp", 2, "missing", REPLICAS),
    ("hsdp-last", 4, "missing", REPLICAS),
    ("ddp", 2, "frozen", r"parameter 3 \(10, 16\) has a gradient on rank 0 and none on rank 1"),
    ("ddp", 2, "nan", r"parameter 0 \(7, 5\) has a gradient that is not finite .*\[rank 1\]"),
    ("fsdp", 2, "nan", r"parameter 0 \(7, 5\) has a gradient that is not finite .*\[rank 1\]"),
    ("fsdp", 2, "option", r"rank 0 has momentum=0.95 in param group 0, rank 1 has momentum=0.5"),
    ("ddp", 2, "initial_lr", r"rank 0 has initial_lr=0.25 in param group 0, rank 1 has initial_lr=0.5"),
    ("ddp", 2, "of_a_rule", r"rank 0 has no such entry, rank 1 has of_a_rule=0.5 in param group 0"),
    (
        "fsdp",
        2,
        "state",
        r"taken 1 steps and its moments are gone: parameter 2 \(3, 7, 5\) lacks momentum_buffer.*rank 1",
    ),
    ("fsdp", 2, "lr", r"lr=None is not valid.*rank 1"),
    ("ddp", 2, "lr", r"lr=None is not valid.*rank 1"),
    ("fsdp", 2, "views", r"TypeError: .*int.*rank 1"),
    ("ddp", 2, "step", r"rank 0 has step=1 in param group 1, rank 1 has step=7"),
    ("ddp", 2, "report", r"OSError: no space left on device \[rank 1\]"),
    ("fsdp", 2, "placements of a parameter", r"OSError: no space left on device \[rank 1\]"),
    *(
        (layout, 2, "no params", r"param group 1 has no 'params', but .*use_muon.* \[rank 1\]")
        for layout in ("ddp", "fsdp")
    ),
    ("ddp", 2, "memory", r"OutOfMemoryError: tried to allocate 2 GiB \[rank 1\]"),
    ("fsdp", 2, "options", r"OSError: no space left on device \[rank 1\]"),
    ("fsdp", 2, "partial", r"parameter 1 \(10, 16\) has a gradient that is stored as .*Partial.* rank 0, .* rank 1"),
    ("fsdp", 2, "placements", r"its momentum_buffer is stored as .*Shard.*, the parameter stored as .*Replicate"),
]


@pytest.mark.parametrize(("layout", "ranks", "fault", "message"), CASES)
def test_a_fault_on_one_rank_is_the_same_error_on_all(pools, layout, ranks, fault, message):
    answers = pools[ranks].run(complaint, layout=layout, fault=fault)
    assert len({text for text, _ in answers}) == 1
    text, untouched = answers[0]
    assert "Muon refuses this step" in text
    assert untouched
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("count", r"rank 0 has 62 parameters, in param groups of 62, rank 1 has 63 parameters"),
        (
            "groups",
            r"rank 0 has 2 parameters, in param groups of 2, rank 1 has 2 parameters, in param groups of 1 and 1",
        ),
    ],
)
def test_ranks_with_other_parameters_are_refused_on_all(pools, what, message):
    """Try 62 and 63 parameters, at the boundary between one and two 62-bit words of a report."""
    answers = pools[2].run(unequal, what=what)
    assert answers[0] == answers[1]
    assert re.search(message, answers[0][0]), answers[0][0]
    assert answers[0][1]


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", 2), ("fsdp-tp", 4)])
def test_a_part_without_a_gradient_is_a_part_that_is_zero(pools, layout, ranks):
    """Drop gradients on one rank, as on an expert parallel rank whose experts saw no token."""
    for without, zeros in pools[ranks].run(gradients_missing_on_one_rank, layout=layout):
        assert all(
            torch.equal(a, b) for one, two in zip(without, zeros, strict=True) for a, b in zip(one, two, strict=True)
        )


def test_a_group_without_gradients_sends_nothing(pools):
    assert pools[2].run(idle, layout="fsdp") == [(0, 0, 0, True)] * 2
