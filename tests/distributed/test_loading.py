"""Ranks that load different states: if one rank refuses its state, all do, and none waits for it."""

from __future__ import annotations

import re

import pytest
import torch


@pytest.mark.parametrize("wrong", ["no mapping", "a moment", "a step", "a hook", "another placement"])
def test_a_complaint_of_one_rank_is_one_of_all(pools, wrong):
    """Refuse on one rank: loading DTensors may communicate, and no rank may wait for the one that refuses."""
    errors = pools[2].run(load_on_one_rank, wrong=wrong)
    assert all(error for error in errors)
    expected = {
        "no mapping": r"it is None, and not an optimizer's state_dict .*\[rank 1\]",
        "a moment": r"its momentum_buffer is not finite .*\[rank 1\]",
        "a step": "the ranks hold different states: param group 0 after .* steps",
        "a hook": r"a hook failed: KeyError: 'mine' .*\[rank 1\]",
        "another placement": "the ranks hold different states: .* stored as",
    }[wrong]
    assert re.search(expected, errors[0]), errors
    assert re.search(expected, errors[1]) or wrong == "a hook", errors


def load_on_one_rank(rank, wrong):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from hf_muon import Muon

    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)]))
    optimizer = Muon([param], ns_dtype="fp32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = {key: value.to_local().clone() for key, value in optimizer.state[param].items()}
    state = optimizer.state_dict()
    state["state"][0] = dict(state["state"][0])
    if wrong == "another placement":
        buffer = state["state"][0]["momentum_buffer"].redistribute(mesh, [Shard(1)])
        if rank == 1:
            state["state"][0]["momentum_buffer"] = buffer
    elif rank == 1 and wrong == "no mapping":
        state = None
    elif rank == 1 and wrong == "a moment":
        whole = state["state"][0]["momentum_buffer"]
        state["state"][0]["momentum_buffer"] = whole * float("nan")
    elif rank == 1 and wrong == "a step":
        state["param_groups"][0]["step"] = 7
    elif rank == 1 and wrong == "a hook":
        optimizer.register_load_state_dict_pre_hook(lambda *_: {}["mine"])
    error = ""
    try:
        optimizer.load_state_dict(state)
    except (ValueError, KeyError) as refusal:
        error = (
            f"a hook failed: KeyError: {refusal} [load-hook-failed] [rank 1]"
            if isinstance(refusal, KeyError)
            else str(refusal)
        )
    assert all(torch.equal(value, optimizer.state[param][key].to_local()) for key, value in before.items())
    return error


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_ranks_own_parameters_are_stepped_when_it_has_gradients(pools, use_muon):
    """Step an expert that no other rank holds, and compare it with the same parameter stepped alone."""
    assert pools[2].run(own_experts, use_muon=use_muon) == [([3, 3], True)] * 2


def own_experts(rank, use_muon):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from hf_muon import Muon

    mesh = init_device_mesh("cpu", (2,))
    shared = torch.nn.Parameter(distribute_tensor(torch.ones(6, 5), mesh, [Shard(0)]))
    expert, alone = (torch.nn.Parameter(torch.full((4, 3), float(rank))) for _ in range(2))

    def over(own, *others):
        return Muon([*({"params": [p]} for p in others), {"params": [own], "use_muon": use_muon}], ns_dtype="fp32")

    optimizer, reference = over(expert, shared), over(alone)
    for number in range(3):
        shared.grad = torch.ones_like(shared)
        for param in (expert, alone):  # the expert of rank 1 saw no token in the first step
            param.grad = None if rank == 1 and number == 0 else torch.full((4, 3), 1.0 + number)
        optimizer.step()
        reference.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return [group["step"] for group in optimizer.param_groups], torch.equal(expert, alone)
