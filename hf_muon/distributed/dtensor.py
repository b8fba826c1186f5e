"""DTensor parameters: FSDP2, HSDP, tensor parallel, and any mix of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_muon.distributed.agreement import connected, is_alive, make_group
from hf_muon.distributed.base import carries
from hf_muon.distributed.layout import Region, regions
from hf_muon.momentum import BLOCK, scale_shape

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


def mesh_regions(param: DTensor, group: dist.ProcessGroup, shape: Sequence[int] | None = None) -> Sequence[Region]:
    """The region of a parameter that each rank of its mesh stores, in the order of the group's ranks.

    Args:
        param: the parameter.
        group: of all ranks of its mesh.
        shape: of another tensor that is stored like it; None for its own.
    """
    mesh = param.device_mesh
    return _regions(
        tuple(param.shape if shape is None else shape),
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        tuple(param.placements),
        tuple(dist.get_process_group_ranks(group)),
    )


@lru_cache(maxsize=1024)
def _regions(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    mesh_ranks: tuple[int, ...],
    placements: tuple[Any, ...],
    group_ranks: tuple[int, ...],
) -> Sequence[Region]:
    by_rank = dict(zip(mesh_ranks, regions(shape, mesh_shape, placements), strict=True))
    return tuple(by_rank[rank] for rank in group_ranks)


def mesh_complaint(param: DTensor) -> str | None:
    """Why a parameter's local tensor is not what its placements say, or cannot be sent; None where all is well."""
    if param.device_mesh.get_coordinate() is None:
        return f"is stored on a mesh of ranks {param.device_mesh.mesh.tolist()}, and this rank is not one of them"
    group = mesh_group(param.device_mesh)
    region = mesh_regions(param, group)[dist.get_rank(group)]
    local = param.to_local()
    # FSDP2 over tensor parallel stores nothing of a dim that is used up as (0, 0), and not as (rows, 0).
    if tuple(local.shape) != region.shape and (local.numel() or region.numel):
        return (
            f"stores a local tensor of shape {tuple(local.shape)}, where its placements {param.placements} on a mesh "
            f"of shape {tuple(param.device_mesh.mesh.shape)} mean {region.shape}"
        )
    if not any(carries(group, kind) for kind in (local.device.type, param.device_mesh.device_type)):
        return (
            f"is stored on {local.device.type}, for which its process group has no backend. With CPU offload, "
            "initialize torch.distributed with backend 'cpu:gloo,cuda:nccl'"
        )
    return None


def blocks_complaint(param: DTensor) -> str | None:
    """Why a parameter's momentum cannot be kept as int8: a block of it that does not lie on one rank."""
    if not _cuts_blocks(tuple(param.shape), tuple(param.device_mesh.mesh.shape), tuple(param.placements)):
        return None
    return (
        f"is stored as {param.placements}, which cuts its rows of {param.shape[-1]} between multiples of {BLOCK}, "
        "where momentum_dtype=int8 keeps a scale for them. Use bf16"
    )


@lru_cache(maxsize=1024)
def _cuts_blocks(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> bool:
    found, scales = (regions(each, mesh_shape, placements) for each in (shape, scale_shape(shape)))
    for stored, scaled in zip(found, scales, strict=True):
        covered = tuple((BLOCK * first, min(BLOCK * last, shape[-1])) for first, last in scaled.dims[-1])
        if stored.numel and (stored.dims[:-1], stored.dims[-1]) != (scaled.dims[:-1], covered):
            return True
    return False


def stored_like(param: DTensor, local: torch.Tensor, shape: Sequence[int]) -> DTensor:
    """What this rank has of a contiguous tensor of some shape, as a DTensor that is stored like a parameter."""
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(tuple(shape), device="meta").stride(),
    )


def sharded_like(param: DTensor, value: torch.Tensor) -> DTensor:
    """A whole tensor, which all ranks have, stored like a parameter; nothing is sent."""
    group = mesh_group(param.device_mesh)
    local = value
    for dim, ranges in enumerate(mesh_regions(param, group, value.shape)[dist.get_rank(group)].dims):
        parts = [local.narrow(dim, start, stop - start) for start, stop in ranges]
        local = torch.cat(parts, dim) if parts else local.narrow(dim, 0, 0)
    if value.shape == param.shape and not local.numel():
        local = local.reshape(param.to_local().shape)
    if value.shape != param.shape:
        return stored_like(param, local.to(param.device).contiguous(), value.shape)
    return DTensor.from_local(
        local.to(param.device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
