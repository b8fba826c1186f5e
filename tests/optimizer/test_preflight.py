"""A step that cannot work raises an error with the reason, before it changes anything."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_muon import Muon
from tests.optimizer.cases import SHAPES, both_gradients, both_halves, gradients, parameters, run


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 3, len(SHAPES) + 1])
def test_non_finite_gradients_are_refused_and_nothing_moves(bad, where):
    optimizer, params = both_halves()
    run(optimizer, params, both_gradients(2))
    weights = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict())
    grads = both_gradients(1, seed=8)[0]
    grads[where].view(-1)[0] = bad
    with pytest.raises(RuntimeError, match="refuses this step; weights and moments are as they were") as error:
        run(optimizer, params, [grads])
    assert str(tuple(params[where].shape)) in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(params, weights, strict=True))
    after = optimizer.state_dict()["state"]
    for i, saved in state["state"].items():
        assert all(torch.equal(value, after[i][key]) for key, value in saved.items())


def test_complaints_name_the_parameters():
    named = [(f"layer.{i}.weight", p) for i, p in enumerate(parameters())]
    optimizer = Muon(named)
    grads = gradients(steps=1)[0]
    grads[1][0, 0] = grads[4][0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"(?s)layer.1.weight.*layer.4.weight"):
        run(optimizer, [p for _, p in named], [grads])


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Muon([{"params": embedding.parameters(), "use_muon": False}])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient; build its embedding with sparse=False"):
        optimizer.step()


def test_sharded_parameters_are_refused_with_what_to_do():
    flat = nn.Parameter(torch.randn(4, 4))
    flat._is_flat_param = True
    with pytest.raises(RuntimeError, match=r"flat FSDP1 parameter.*Muon needs FSDP2"):
        Muon([flat])
    partitioned = nn.Parameter(torch.randn(4, 4))
    partitioned.ds_id = 1
    optimizer = Muon([partitioned])  # before DeepSpeed wraps it
    with pytest.raises(RuntimeError, match="partitioned by DeepSpeed ZeRO-3, and stepped without it"):
        optimizer.step()


def test_unreduced_dtensors_are_refused_also_when_swapped_in_later():
    """Check DTensors that accelerate's FSDP2 swaps into the groups of an optimizer over plain parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        partial = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Partial()]))
        with pytest.raises(RuntimeError, match=r"is a DTensor with placement P.* Redistribute it first"):
            Muon([partial])
        optimizer = Muon(parameters([(4, 4)]))
        optimizer.param_groups[0]["params"][0] = partial
        partial.grad = torch.zeros_like(partial)
        with pytest.raises(RuntimeError, match=r"refuses this step.*\n.*is a DTensor with placement P"):
            optimizer.step()
        sharded = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
        optimizer.param_groups[0]["params"][0] = sharded
        sharded.grad = torch.randn(4, 4)
        with pytest.raises(RuntimeError, match="is a DTensor, and its gradient a plain tensor"):
            optimizer.step()
    finally:
        torch.distributed.destroy_process_group()


def test_a_complaint_of_one_group_leaves_the_others_as_they_were():
    optimizer, params = both_halves()
    run(optimizer, params, both_gradients(1))
    before = [p.detach().clone() for p in params]
    buffer = optimizer.state[params[0]]["momentum_buffer"].clone()
    grads = both_gradients(1)[0]
    params[-1].data = torch.zeros(3)
    grads[-1] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"its exp_avg has shape \(16,\). The parameter was resized"):
        run(optimizer, params, [grads])
    optimizer.param_groups[0]["ns_dtype"] = "fp16"
    with pytest.raises(RuntimeError, match=r"does not run on a CPU[\s\S]*its exp_avg has shape"):
        run(optimizer, params, [grads])
    assert all(torch.equal(a, b) for a, b in zip(params[:-1], before, strict=False))
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], buffer)
