"""Steps of ranks that do not have the same parameters or gradients; pools import these functions by name."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from hf_muon import Muon
from hf_muon.distributed import groups
from tests.distributed.cases import make, muon_over, placed, whole_state
from tests.equality.cells import MATRICES as SHAPES
from tests.equality.cells import VECTORS
from tests.equality.counted import Counted
from tests.equality.placed import stored


@contextlib.contextmanager
def naming(scheme):
    """Have torch name groups as before 2.14 (`joined`), since then (`asked`), or in an `other` way."""
    c10d = dist.distributed_c10d

    def hashed(ranks):
        world = c10d._world
        return f"{list(ranks)} {world.group_count if scheme == 'asked' else len(world.pg_names)}"

    def name_of(ranks, use_hashed_name):
        hashes = hashed if scheme == "other" else c10d._hash_ranks_to_str
        name = hashes(ranks) if use_hashed_name else str(c10d._world.group_count)
        c10d._world.group_count += scheme == "asked" or not use_hashed_name
        return name

    with mock.patch.multiple(c10d, _hash_ranks_to_str=hashed, _process_group_name=name_of):
        yield


def pipeline_under(rank, scheme, meshed=True):
    """Return what `pipeline` returns, or its error, after which all ranks create groups with one another."""
    with naming(scheme), mock.patch.multiple(groups, _groups={}, _roots={}):
        try:
            return pipeline(rank, meshed)
        except RuntimeError as error:
            return str(error)
        finally:
            dist.barrier(dist.new_group())


def pipeline(rank, meshed, steps=2):
    """Step a stage with data and tensor parallelism beside stages of one rank, and each stage in a single process.

    Args:
        rank: the rank of this process.
        meshed: whether all four ranks of the first stage store a part of one matrix.
    """
    others = range(4, dist.get_world_size())
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    dist.new_group([0, *others])  # tied embeddings: some ranks are in more groups than others
    shapes = [(7, 6), (9, 5), (6, 10), (4,)] if rank < 4 else [(5, 3), (7, 2)]

    def put(tensor, i):
        if rank >= 4 or i in (1, 3) or (i == 2 and not meshed):
            return tensor.clone()
        return stored(tensor, *((mesh["tp"], [Shard(0)]) if i == 0 else (mesh, [Shard(0), Shard(1)])))

    results = []
    for single in (False, True):
        place = (lambda tensor, i: tensor.clone()) if single else put
        params = [nn.Parameter(place(w, i)) for i, w in enumerate(make(shapes, 0))]
        groups = [{"params": [p for p in params if p.ndim == 2]}]
        groups += [{"params": [p for p in params if p.ndim == 1], "use_muon": False}]
        shared = mesh["dp"].get_group() if rank < 4 and not single else None
        optimizer = Muon(groups, ns_dtype="fp32", replicate_group=shared)
        for step in range(steps):
            for i, (param, grad) in enumerate(zip(params, make(shapes, step + 1), strict=True)):
                param.grad = place(grad, i)
            with Counted() as counted:
                optimizer.step()
        if not single:
            words = counted.words
        results.append(whole_state(params, optimizer))
    return results, words


def idle(rank, layout):
    """Count collectives and states of a step without gradients, and of one with those of AdamW alone."""
    _, params = placed(make(SHAPES + VECTORS, 0), layout)
    optimizer = muon_over(params, len(SHAPES), layout)
    with Counted() as nothing:
        optimizer.step()
    before = len(optimizer.state)
    for param in params[len(SHAPES) :]:
        param.grad = torch.ones_like(param)
    with Counted() as vectors:
        optimizer.step()
    return nothing.calls, vectors.calls, before, len(optimizer.state) == len(params)


def own_experts(rank, use_muon):
    """Step an expert that no other rank holds; return counts of steps, and whether it is as if stepped alone."""
    mesh = init_device_mesh("cpu", (2,))
    shared = nn.Parameter(stored(torch.ones(6, 5), mesh, [Shard(0)]))
    expert, alone = (nn.Parameter(torch.full((4, 3), float(rank))) for _ in range(2))

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
