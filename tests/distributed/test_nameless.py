"""Parameters without names: ranks that hold other ones, or the same in another order, are refused and never mixed up.

All matrices have one shape, so nothing else tells them apart. Ranks import functions such as `loop` by name.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hf_muon import Muon


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))


def data(rank, step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def loop(rank, layout, way, muon=True):
    """Take two steps; return how far weights are from those of one process, relative to their change, or the error.

    Args:
        rank: of this process.
        layout: "ddp" or "fsdp2".
        way: "alike"; "reversed" (on rank 1); "halves" (each rank steps every second one, and broadcasts it); "zero1";
            "own halves" and "own zero1" with a `replicate_group` of this rank.
        muon: or else AdamW.
    """
    own = dist.new_group([rank], use_local_synchronization=True)

    def made(params, group=None, **_):
        return Muon(params, lr=0.02, replicate_group=group) if muon else torch.optim.AdamW(params, lr=0.02)

    net, reference = network(), network()
    if layout == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        model = fully_shard(net, mesh=mesh)
    else:
        model = DistributedDataParallel(net)
    params, expected = list(net.parameters()), list(reference.parameters())
    before = [param.detach().clone() for param in expected]
    group = own if way.startswith("own") else None
    if way.endswith("zero1"):
        # It would write a `replicate_group` among its own arguments into param groups.
        optimizer = ZeroRedundancyOptimizer(params, functools.partial(made, group=group))
    else:
        mine = params[rank::2] if way.endswith("halves") else params
        optimizer = made(mine[::-1] if way == "reversed" and rank else mine, group)
    its = made(expected, own)
    try:
        for step in range(2):
            model(data(rank, step)).square().sum().backward()
            optimizer.step()
            model.zero_grad()
            for k, param in enumerate(params if way.endswith("halves") else ()):
                dist.broadcast(param.data, k % 2)
            (sum(reference(data(other, step)).square().sum() for other in range(2)) / 2).backward()
            its.step()
            its.zero_grad()
    except RuntimeError as error:
        return str(error)
    whole = [param.full_tensor() if layout == "fsdp2" else param for param in params]
    triples = zip(whole, expected, before, strict=True)
    return max(float((one - other).norm() / (other - old).norm()) for one, other, old in triples)


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        ("ddp", "reversed"),
        ("fsdp2", "reversed"),
        pytest.param("ddp", "halves", marks=pytest.mark.extended),
        ("ddp", "zero1"),
    ],
)
def test_ranks_with_other_parameters_are_refused(pools, layout, way):
    first, other = pools[2].run(loop, layout=layout, way=way)
    assert first == other
    assert "of its model" in first
    assert "[ranks-disagree]" in first
    assert pools[2].run(loop, layout=layout, way=way, muon=False) == pytest.approx([0, 0], abs=1e-3)


@pytest.mark.promise("hand-sharded")
@pytest.mark.parametrize(
    ("layout", "way"), [("ddp", "alike"), ("fsdp2", "alike"), ("ddp", "own halves"), ("ddp", "own zero1")]
)
def test_ranks_with_the_same_parameters_or_a_group_of_their_own_step_as_one_process(pools, layout, way):
    assert pools[2].run(loop, layout=layout, way=way) == pytest.approx([0, 0], abs=1e-3)


def homeless(rank, named):
    """Step DTensors that no module holds, which rank 1 has in another order if they have names; return the error."""
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(distribute_tensor(torch.full((4, 4), float(k)), mesh, [Shard(0)])) for k in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = Muon([(f"weight {k}", param) for k, param in enumerate(params)] if named else params)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_sharded_parameters_that_no_module_holds_need_names(pools):
    first, other = pools[2].run(homeless, named=False)
    assert first == other
    assert "(name, parameter)" in first
    assert "[no-names]" in first
    assert pools[2].run(homeless, named=True) == ["", ""]
