"""DTensor parameters: FSDP2, HSDP, tensor parallel, and any mix of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_muon.math.moments import BLOCK, scale_shape
from hf_muon.math.torch_private import dtensor_on_host, part_of, shard_orders
from hf_muon.storage.regions import Region, regions


def mesh_regions(param: DTensor, ranks: Sequence[int], shape: Sequence[int] | None = None) -> tuple[Region, ...]:
    """Return the region of a parameter that each rank stores.

    Args:
        param: the parameter.
        ranks: global ranks of its mesh, in the order of the result.
        shape: the shape of another tensor with the parameter's mesh and placements; None for the parameter's.
    """
    mesh = param.device_mesh
    return _regions(
        tuple(param.shape if shape is None else shape),
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        tuple(param.placements),
        tuple(ranks),
    )


@lru_cache(maxsize=1024)
def _regions(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    mesh_ranks: tuple[int, ...],
    placements: tuple[Any, ...],
    ranks: tuple[int, ...],
) -> tuple[Region, ...]:
    by_rank = dict(zip(mesh_ranks, regions(shape, mesh_shape, placements), strict=True))
    return tuple(by_rank[rank] for rank in ranks)


def own_region(param: DTensor, shape: Sequence[int]) -> Region:
    """Return the region that this rank stores of a tensor of shape `shape` with a parameter's mesh and placements."""
    return mesh_regions(param, (dist.get_rank(),), shape)[0]


def mesh_complaint(param: DTensor) -> str | None:
    """Return why a parameter's local tensor is not the one that its placements mean, or None if it is."""
    if param.device_mesh.get_coordinate() is None:
        return (
            f"is stored on a mesh of ranks {param.device_mesh.mesh.tolist()}, and this rank is not one of them "
            "[not-on-mesh]"
        )
    for dim, order in shard_orders(param).items():
        return (
            f"has its dim {dim} sharded over the mesh dims {order} in this order, and only their own order is known "
            "here: redistribute it in torch's default shard order [shard-order]"
        )
    if not _is_as_torch_splits(param):
        return (
            f"is stored as {param.placements} on a mesh of shape {tuple(param.device_mesh.mesh.shape)}, which this "
            "version of torch splits into other rows or columns than hf_muon expects. Report it, with torch's version "
            "[unexpected-split]"
        )
    region, local = own_region(param, param.shape), param.to_local()
    # With FSDP2 over tensor parallel, an empty shard has shape (0, 0) instead of (rows, 0).
    if tuple(local.shape) != region.shape and (local.numel() or region.numel):
        return (
            f"stores a local tensor of shape {tuple(local.shape)}, where its placements {param.placements} on a mesh "
            f"of shape {tuple(param.device_mesh.mesh.shape)} mean {region.shape} [local-shape]"
        )
    return None


def _is_as_torch_splits(param: DTensor) -> bool:
    """Return whether torch's own split of the indices of each dim gives those of this rank's region."""
    mesh, at = param.device_mesh.mesh, tuple(param.device_mesh.get_coordinate() or ())
    (region,) = mesh_regions(param, (int(mesh[at]),))
    # Whatever default device the script has set.
    with torch.device("cpu"):
        for dim, ranges in enumerate(region.dims):
            indices = torch.arange(param.shape[dim]).view([-1 if other == dim else 1 for other in range(param.ndim)])
            for size, index, placement in zip(mesh.shape, at, param.placements, strict=True):
                if getattr(placement, "dim", None) == dim:
                    indices = part_of(indices, placement, size, index)
            expected = [torch.arange(start, stop) for start, stop in ranges] or [torch.empty(0, dtype=torch.int64)]
            if not torch.equal(indices.flatten(), torch.cat(expected)):
                return False
    return True


def quantization_complaint(param: DTensor, option: str) -> str | None:
    """Return why a parameter's moments cannot be int8, or None: a sharding cuts through a quantization block."""
    if not _cuts_quantization_blocks(tuple(param.shape), tuple(param.device_mesh.mesh.shape), tuple(param.placements)):
        return None
    return (
        f"is stored as {param.placements}, which cuts its rows of {param.shape[-1]} between multiples of {BLOCK}, "
        f"where {option}=int8 keeps a scale for them. Use bf16 [int8-blocks]"
    )


@lru_cache(maxsize=1024)
def _cuts_quantization_blocks(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> bool:
    values, scales = (regions(each, mesh_shape, placements) for each in (shape, scale_shape(shape)))
    for stored, scaled in zip(values, scales, strict=True):
        covered = tuple((BLOCK * first, min(BLOCK * last, shape[-1])) for first, last in scaled.dims[-1])
        if stored.numel and (stored.dims[:-1], stored.dims[-1]) != (scaled.dims[:-1], covered):
            return True
    return False


def wrapped(param: DTensor, local: torch.Tensor, shape: Sequence[int]) -> DTensor:
    """Return a DTensor of shape `shape` with a parameter's mesh and placements, from this rank's local tensor."""
    size = torch.Size(shape)
    stride = param.stride() if size == param.shape else torch.empty(size, dtype=local.dtype, device="meta").stride()
    if local.device.type in (param.device_mesh.device_type, "meta"):
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=size, stride=stride
        )
    return dtensor_on_host(local, param.device_mesh, param.placements, size, tuple(stride))


def sharded_like(param: DTensor, value: torch.Tensor) -> DTensor:
    """Shard a tensor that all ranks have whole like a parameter, without communication."""
    local = value
    for dim, ranges in enumerate(own_region(param, value.shape).dims):
        pieces = [local.narrow(dim, start, stop - start) for start, stop in ranges]
        local = torch.cat(pieces, dim) if pieces else local.narrow(dim, 0, 0)
    # The shape of an empty shard may differ, see `mesh_complaint`.
    if value.shape == param.shape and not local.numel():
        local = local.reshape(param.to_local().shape)
    return wrapped(param, local.to(param.device).contiguous(), value.shape)
