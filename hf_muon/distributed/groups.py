"""Process groups: of a mesh, and of all ranks that share parameters, made without other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_muon.distributed.agreement import gather, packed, unpacked

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def carries(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a process group has a backend for tensors of a device type."""
    try:
        group._get_backend(torch.device(device_type))
    except RuntimeError:
        return False
    return True


def backend_complaint(param: DTensor) -> str | None:
    """Say why a parameter's local tensor cannot be sent; None where it can."""
    local = param.to_local()
    if any(carries(mesh_group(param.device_mesh), kind) for kind in (local.device.type, param.device_mesh.device_type)):
        return None
    return (
        f"is stored on {local.device.type}, for which its process group has no backend. With CPU offload, "
        "initialize torch.distributed with backend 'cpu:gloo,cuda:nccl'"
    )


_roots: dict[tuple[str, ...], dist.ProcessGroup] = {}


def root_group(groups: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of all ranks that these groups connect, with one another and through the groups of others.

    Pipeline stages are not connected; data and tensor parallel groups of one stage are. Ranks outside take no part.
    All ranks of the groups must call this together the first time.
    """
    groups = sorted(set(groups), key=_order)
    for group in groups:
        if group.size() == dist.get_world_size():
            return group
    names = tuple(group.group_name for group in groups)
    if names not in _roots or not is_alive(_roots[names]):
        ranks, count = connected(groups)
        same = [group for group in groups if dist.get_process_group_ranks(group) == ranks]
        _roots[names] = same[0] if same else make_group(ranks, count)
    return _roots[names]


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group is of the present world; one of a destroyed world has no rank any more."""
    return group in dist.distributed_c10d._world.pg_map


def _order(group: dist.ProcessGroup) -> tuple[list[int], str]:
    """An order of groups that is the same on all ranks: collectives in this order cannot wait for one another."""
    return dist.get_process_group_ranks(group), group.group_name


def connected(groups: Sequence[dist.ProcessGroup]) -> tuple[list[int], int]:
    """Return the ranks that a rank's groups connect, directly or by chains of groups, and the most groups one is in.

    Every rank passes on which ranks it knows of, and whose groups are among what it knows. It knows all when these are
    the same ranks. A group is left when all of its members have said so, which they hear at the same time.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    known = [False] * world
    told = [other == rank for other in range(world)]
    for group in groups:
        for other in dist.get_process_group_ranks(group):
            known[other] = True
    count = len(dist.distributed_c10d._world.pg_names)
    talking = sorted(groups, key=_order)
    while talking:
        for group in list(talking):
            mine = torch.tensor([known == told, count, *packed(known), *packed(told)], dtype=torch.int64)
            heard = gather(group, torch.device("cpu"), mine)
            for _, number, *numbers in heard:
                words = len(numbers) // 2
                known = [a or b for a, b in zip(known, unpacked(numbers[:words], world), strict=True)]
                told = [a or b for a, b in zip(told, unpacked(numbers[words:], world), strict=True)]
                count = max(count, number)
            if all(knows_all for knows_all, *_ in heard):
                talking.remove(group)
    return [other for other in range(world) if known[other]], count


def make_group(ranks: Sequence[int], count: int) -> dist.ProcessGroup:
    """Make a process group in which no other ranks take part.

    torch derives its name from the number of groups that a rank is in, and waits forever where this differs. Groups of
    a single rank make up for it.

    Args:
        ranks: of the new group, in order.
        count: the most groups that one of them is in.
    """
    while len(dist.distributed_c10d._world.pg_names) < count:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh, made once for a set of ranks; they must call this together."""
    if mesh.ndim == 1:
        group: dist.ProcessGroup = mesh.get_group()
        return group
    ranks = _ranks(mesh)
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    if ranks not in _groups or not is_alive(_groups[ranks]):
        _, count = connected([mesh.get_group(axis) for axis in range(mesh.ndim)])
        _groups[ranks] = make_group(ranks, count)
    return _groups[ranks]


def mesh_groups(meshes: Iterable[DeviceMesh]) -> list[dist.ProcessGroup]:
    """Return the groups of meshes that this rank is in, made in an order that is the same on all ranks."""
    own = {id(mesh): mesh for mesh in meshes if mesh.get_coordinate() is not None}
    return [mesh_group(mesh) for mesh in sorted(own.values(), key=_ranks)]


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))
