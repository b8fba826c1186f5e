"""The protocol between Muon and a framework that replaces parameters with flat partitions, without a framework."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.optimizer.partitioned import attach_partitions, expect_partitions
from hf_muon.storage.partitions import Partition


def partition(**facts):
    return Partition(group=None, rank=0, slices=[], device=torch.device("cpu"), **facts)


def flat():
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    return param


@pytest.fixture
def optimizer():
    param = nn.Parameter(torch.ones(4, 4))
    return Muon([{"params": [param], "views": ["rows 2+2"]}, {"params": [flat()], "use_muon": False}])


def test_until_partitions_are_attached_steps_create_state_only(optimizer):
    matrix, vector = (group["params"][0] for group in optimizer.param_groups)
    expect_partitions(optimizer, "Framework")
    assert optimizer.partitioned.views[matrix].text == "rows 2+2"
    with pytest.raises(RuntimeError, match=r"parameter 0 \(4,\) is stepped before it is known how Framework stores it"):
        optimizer.step()
    vector.grad.zero_()
    optimizer.step()
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    attach_partitions(optimizer, None)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_a_step_is_complete_when_all_partitions_have_been_stepped(optimizer):
    flats = [flat() for _ in range(3)]
    attach_partitions(optimizer, {each: partition() for each in flats})
    complete = [optimizer.partitioned.completes_step([{"params": [each]}]) for each in (*flats, *flats)]
    assert complete == [False, False, True, False, False, True]
    refused_on_the_way = [flats[0], flats[1]]
    complete = [optimizer.partitioned.completes_step([{"params": [each]}]) for each in (*refused_on_the_way, *flats)]
    assert complete == [False, False, False, False, True]
    assert optimizer.partitioned.completes_step([{"params": flats}])


def test_a_group_is_complete_with_its_last_partition(optimizer):
    first, last = flat(), flat()
    attach_partitions(optimizer, {first: partition(last=False), last: partition()})
    assert not optimizer.partitioned.completes_group({"params": [first]})
    assert optimizer.partitioned.completes_group({"params": [last]})
    assert not optimizer.partitioned.completes_group({"params": [first, last]})


def test_stale_gradients_become_zeros(optimizer):
    some, all_of_it = flat(), flat()
    attach_partitions(optimizer, {some: partition(without_gradient=lambda: [slice(1, 3)]), all_of_it: partition()})
    optimizer.partitioned.clear_stale_gradients([{"params": [some, all_of_it]}])
    assert some.grad.tolist() == [1, 0, 0, 1]
    assert all_of_it.grad.tolist() == [1, 1, 1, 1]


def test_an_optimizer_that_no_framework_wraps_has_nothing_to_do(optimizer):
    groups = optimizer.param_groups
    optimizer.partitioned.clear_stale_gradients(groups)
    assert groups[1]["params"][0].grad.tolist() == [1, 1, 1, 1]
    assert all(optimizer.partitioned.completes_group(group) for group in groups)
    assert optimizer.partitioned.completes_step(groups)
    assert optimizer.partitioned.refusal == "Muon refuses this step; weights and moments are as they were"
