"""Placements of parameters by the name of a layout, and whole tensors stored in them without communication."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon.storage.regions import regions


def placements_of(layout: str, ndim: int, index: int = 0) -> tuple[tuple[int, ...], list[Any]]:
    """Return the mesh shape and the placements of a parameter with `ndim` dims; some layouts alternate by `index`."""
    layout, world = layout.removeprefix("placed-"), dist.get_world_size()
    half, last = (world // 2, 2), Shard(ndim - 1)
    if layout.startswith("mixed"):
        kinds: list[list[Any]] = [[Replicate()], [Shard(0)], [last]]
        return (world,), kinds[(index + (layout == "mixed-turned")) % 3]
    # Stacks of experts on a mesh of two axes, all other parameters on a mesh of one.
    experts: Any = (half, [Shard(1), Shard(0)]) if ndim == 3 else ((world,), [Shard(0)])
    return {
        "fsdp": ((world,), [Shard(0)]),
        "last": ((world,), [last]),
        "middle": ((world,), [Shard(1) if ndim > 2 else Replicate()]),
        "replicate": ((world,), [Replicate()]),
        "hsdp": ((2, world // 2), [Replicate(), Shard(0)]),
        "hsdp-last": ((2, world // 2), [Shard(0), Replicate()]),
        "fsdp-tp": (half, [_StridedShard(0, split_factor=2), Shard(0)]),
        "fsdp-tp-row": (half, [Shard(0), last]),
        "fsdp-fsdp": (half, [Shard(0), Shard(0)]),
        "experts": experts,
        "odd": (half, [_StridedShard(0, split_factor=3), Replicate()]),
    }[layout]


def stored(tensor: Tensor, mesh: Any, placements: Any) -> DTensor:
    """Return the DTensor of a tensor that every rank has in full, without communication."""
    flat = 0
    for size, position in zip(mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        flat = flat * size + position
    local = tensor
    for dim, ranges in enumerate(regions(tensor.shape, mesh.mesh.shape, placements)[flat].dims):
        indices = [i for start, stop in ranges for i in range(start, stop)]
        local = local.index_select(dim, torch.tensor(indices, dtype=torch.long).to(local.device))
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, all of it, on the CPU; all ranks of a DTensor take part.

    They gather on the CPU: gloo ends the process where DTensor lets it gather CUDA tensors (pytorch#152645).
    """
    tensor = tensor.detach().cpu()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
