"""Process groups: of a mesh, and of all ranks that share parameters, created without the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_muon.distributed.ranks import Ranks, pack_bits, unpack_bits
from hf_muon.math.torch_private import device_types, new_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def has_backend(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether a process group has a backend for tensors of a device type."""
    return device_type in device_types(group)


def backend_complaint(param: DTensor) -> str | None:
    """Return why a parameter's local tensor cannot be sent, or None if it can."""
    local = param.to_local()
    if any(
        has_backend(mesh_group(param.device_mesh), kind) for kind in (local.device.type, param.device_mesh.device_type)
    ):
        return None
    return (
        f"is stored on {local.device.type}, for which its process group has no backend. With CPU offload, "
        "initialize torch.distributed with backend 'cpu:gloo,cuda:nccl' [no-backend]"
    )


_roots: dict[tuple[str, ...], dist.ProcessGroup] = {}


def root_group(groups: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of all ranks that these groups connect, directly or through the groups of other ranks.

    The data and tensor parallel groups of one pipeline stage are connected; different stages are not. All ranks of the
    groups must call this together the first time; no other rank takes part.
    """
    groups = sorted(set(groups), key=_order)
    for group in groups:
        if group.size() == dist.get_world_size():
            return group
    names = tuple(group.group_name for group in groups)
    if names not in _roots or not is_alive(_roots[names]):
        for dead in [names for names, root in _roots.items() if not is_alive(root)]:
            del _roots[dead]
        ranks = connected(groups)
        same = [group for group in groups if dist.get_process_group_ranks(group) == ranks]
        _roots[names] = same[0] if same else make_group(ranks)
    return _roots[names]


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a group still exists: destroying the default process group destroys all."""
    try:
        return len(dist.get_process_group_ranks(group)) > 0
    except (KeyError, RuntimeError, ValueError):
        return False


def _order(group: dist.ProcessGroup) -> tuple[list[int], str]:
    """Return a sort key that is the same on all ranks, so that collectives in this order cannot deadlock."""
    return dist.get_process_group_ranks(group), group.group_name


def connected(groups: Sequence[dist.ProcessGroup]) -> list[int]:
    """Return the ranks that this rank's groups connect, directly or by chains.

    Each rank keeps two sets: the ranks that it knows of, and the ranks whose groups it knows. In every round the
    members of a group exchange and unite their sets. A rank knows everything once its two sets are equal; a group is
    done once all members know everything, which they learn in the same round.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    reached = [False] * world
    complete = [other == rank for other in range(world)]
    for group in groups:
        for other in dist.get_process_group_ranks(group):
            reached[other] = True
    pending = sorted(groups, key=_order)
    while pending:
        for group in list(pending):
            report = [int(reached == complete), *pack_bits(reached), *pack_bits(complete)]
            reports = Ranks(group, torch.device("cpu")).numbers(report)
            for _, *numbers in reports:
                half = len(numbers) // 2
                reached = [a or b for a, b in zip(reached, unpack_bits(numbers[:half], world), strict=True)]
                complete = [a or b for a, b in zip(complete, unpack_bits(numbers[half:], world), strict=True)]
            if all(knows_all for knows_all, *_ in reports):
                pending.remove(group)
    return [other for other in range(world) if reached[other]]


_made: list[dist.ProcessGroup] = []


def make_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a process group without the other ranks taking part.

    Args:
        ranks: the global ranks of the new group, in order, all of which must call this together.

    Raises:
        RuntimeError: this torch names groups in a way that is not known here.
    """
    digest = hashlib.blake2b(str(ranks).encode(), digest_size=16).hexdigest()
    # Those that were destroyed do not count: a rank that has been restarted knows nothing of them.
    _made[:] = filter(is_alive, _made)
    earlier = sum(dist.get_process_group_ranks(group) == list(ranks) for group in _made)
    _made.append(new_group(ranks, f"hf_muon.{digest}.{earlier}"))
    return _made[-1]


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh, which must call this together; created once for a set of ranks."""
    if mesh.ndim == 1:
        group: dist.ProcessGroup = mesh.get_group()
        return group
    ranks = _ranks(mesh)
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    if ranks not in _groups or not is_alive(_groups[ranks]):
        _groups[ranks] = make_group(ranks)
    return _groups[ranks]


def mesh_groups(meshes: Iterable[DeviceMesh]) -> list[dist.ProcessGroup]:
    """Return the groups of the meshes that this rank is in, created in the same order on all ranks."""
    by_id = {id(mesh): mesh for mesh in meshes if mesh.get_coordinate() is not None}
    return [mesh_group(mesh) for mesh in sorted(by_id.values(), key=_ranks)]


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))
