"""Gradients that reach Muon under ZeRO: the sum of the micro-batches of one step, orthogonalized once."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch

from hf_muon import Muon, build_optimizer
from hf_muon.integrations.deepspeed.gradients import OrthogonalizedMomentum, hide_name
from tests.deepspeed.gradient_cases import (
    REACHED,
    branched,
    branched_in_zero,
    dropped,
    partial,
    partial_in_zero,
    partly_frozen,
)
from tests.deepspeed.test_training import CPU, STAGES

pytestmark = pytest.mark.usefixtures("quiet")

reference = functools.cache(branched)
CELLS = {
    **STAGES,
    "2-cpu-overlap": {"stage": 2, "zero": {**CPU, "overlap_comm": True, "reduce_bucket_size": 300}},
    "2-cpu-round-robin": {"stage": 2, "zero": {**CPU, "round_robin_gradients": True}},
    "3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 300}},
    "3-cpu-sub-groups": {"stage": 3, "zero": {**CPU, "sub_group_size": 300}},
}


def assert_equal(weights, expected):
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.extended(but="^(2-cpu|3)-4")
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_a_branch_that_not_every_micro_batch_reaches(ranks, cell, accumulate):
    """Run four micro-batches a step, of which DeepSpeed 0.18.4 loses the middle ones in ZeRO-2 with CPU offload."""
    patterns = list(REACHED) if accumulate > 1 else ["odd steps never"]
    for weights_by_pattern in ranks.run(branched_in_zero, patterns=patterns, accumulate=accumulate, **CELLS[cell]):
        for pattern, weights in weights_by_pattern.items():
            assert_equal(weights, reference(pattern, accumulate))


@pytest.mark.extended(but="2-cpu")
@pytest.mark.parametrize("zero", [{}, CPU], ids=["2", "2-cpu"])
def test_gradients_of_bf16_that_are_added_up_in_fp32(ranks, zero):
    """Run without `reduce_scatter`, with which DeepSpeed loses some gradients of any optimizer."""
    options = {"dtype": "bfloat16", "accumulate": 4}
    config = {"stage": 2, "zero": {**zero, "reduce_scatter": False}, "data_types": {"grad_accum_dtype": "fp32"}}
    for weights_by_pattern in ranks.run(branched_in_zero, patterns=list(REACHED), **options, **config):
        for pattern, weights in weights_by_pattern.items():
            assert_equal(weights, reference(pattern, **options))


@pytest.mark.extended(but="^(2|3)$")
@pytest.mark.parametrize("cell", [cell for cell in STAGES if cell != "0"])
def test_what_a_step_does_not_reach_does_not_count_when_gradients_are_clipped(ranks, cell):
    pattern = "odd steps never"
    expected = reference(pattern, clipping=0.1)
    # Gradients of four rows have a low rank, so that Muon orthogonalizes their rounding, too. The bound is measured: it
    # is how far a few units in the last place of the factor move the weights. An old gradient moves them 10,000 times
    # as far.
    rounded = reference(pattern, clipping=0.1 * (1 + 2**-20))
    weights = ranks.run(branched_in_zero, patterns=[pattern], clipping=0.1, **CELLS[cell])[0][pattern]
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() < 10 * (rounded[name] - weight).norm(), name


@pytest.mark.extended(but="^2$")
@pytest.mark.parametrize("cell", [cell for cell in STAGES if cell != "0"])
def test_gradients_of_a_step_that_overflowed_do_not_stay(ranks, cell):
    """Overflow in step 2, which reaches the branch; step 3 does not reach it."""
    pattern, options = "odd steps never", {"dtype": "bfloat16", "overflow": 2}
    for weights_by_pattern in ranks.run(branched_in_zero, patterns=[pattern], **options, **CELLS[cell]):
        assert_equal(weights_by_pattern[pattern], reference(pattern, **options))


@pytest.mark.extended(but="2")
@pytest.mark.parametrize("stage", [1, 2])
def test_sums_in_fp32_of_a_step_that_overflowed_do_not_stay(ranks, stage):
    """Offload the optimizer: without hf_muon, DeepSpeed then skips all later steps."""
    options = {"dtype": "bfloat16", "overflow": 1}
    config = {"stage": stage, "zero": {**CPU, "reduce_scatter": False}, "data_types": {"grad_accum_dtype": "fp32"}}
    for weights_by_pattern in ranks.run(branched_in_zero, patterns=["always"], **options, **config):
        assert_equal(weights_by_pattern["always"], reference("always", **options))


@pytest.mark.extended(but="^2$")
@pytest.mark.parametrize("cell", ["2", "2-cpu", "3", "3-cpu"])
def test_gradients_that_were_dropped_do_not_stay(ranks, cell):
    """Skip a batch as a loop that leaves out a non-finite loss: backward, zero_grad, and the next batch."""
    for one, other in ranks.run(dropped, **CELLS[cell]):
        assert_equal(one, other)


@pytest.mark.extended(but="^(2|3)$")
@pytest.mark.parametrize("cell", STAGES)
def test_deepspeeds_own_flag_on_parameters(ranks, cell):
    """Train a model whose matrices all carry `use_muon`: the embedding and the output stay with AdamW."""
    for weights_by_case in ranks.run(partial_in_zero, **STAGES[cell]):
        for (frozen, _), weights in weights_by_case.items():
            assert_equal(weights, reference_of_partial(frozen))


reference_of_partial = functools.cache(partial)


def test_nothing_but_a_table_to_train_is_refused():
    with pytest.raises(ValueError, match="No parameter of Partial reaches Muon"):
        build_optimizer(partly_frozen("all but the table"))


@pytest.mark.parametrize("kind", [Muon, type("MyMuon", (Muon,), {})])
def test_the_name_that_deepspeed_sees(kind):
    """Hide the class name everywhere, because a later DeepSpeed may look at it in more places; it is still a Muon."""
    optimizer = kind([torch.nn.Parameter(torch.ones(3, 4))])
    hide_name(optimizer)
    assert isinstance(optimizer, kind)
    assert "muon" not in type(optimizer).__name__.lower()
    hide_name(optimizer)
    assert "muon" not in type(copy.deepcopy(optimizer)).__name__.lower()
    if kind is Muon:
        assert type(pickle.loads(pickle.dumps(optimizer))) is OrthogonalizedMomentum
