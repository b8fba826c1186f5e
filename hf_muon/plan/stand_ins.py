"""Fake runs on several ranks: parameters without memory in a fake process group."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_muon.build import groups_of, muon_options
from hf_muon.config import COMM_DTYPES, MuonConfig
from hf_muon.diagnostics.log import has_process_group
from hf_muon.math.torch_private import fake_store, forget_meshes
from hf_muon.optimizer.layout import StepLayout
from hf_muon.optimizer.muon import Muon
from hf_muon.routing.route import Route
from hf_muon.storage import views
from hf_muon.storage.partitions import Division, Partition, Slice

ACCELERATOR = torch.device("meta")
"""On which a plan has the products, so that units are those of accelerators."""
# DeepSpeed's sub_group_size: ZeRO-3 begins another flat partition after so many elements on a rank.
_SUB_GROUP = 10**9
# DeepSpeed pads a group of ZeRO-1 and 2 so that each rank has a multiple of so many elements, its
# nccl_start_alignment_factor.
_ALIGNMENT = 2


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a fake process group, whose collectives do nothing."""
    import torch.distributed as dist

    if ranks == 1:
        yield
        return
    if not dist.is_available():
        raise RuntimeError(
            "a plan for several ranks needs a torch with torch.distributed, and this one has none [no-distributed]"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "a plan pretends to be on other ranks: make it in a process that is in no process group [in-process-group]"
        )
    dist.init_process_group("fake", rank=0, world_size=ranks, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def stored_groups(
    routes: Sequence[Route], config: MuonConfig, layout: str, replicas: int, dtype: torch.dtype
) -> tuple[list[dict[str, Any]], StepLayout]:
    """Return param groups with parameters as a framework stores them, and the layout of their step.

    Args:
        routes: the routes of the model's parameters.
        config: the options of the run.
        layout: one of `step_plan.LAYOUTS`.
        replicas: copies of the model under `hsdp`.
        dtype: the dtype of the stored weights.

    Raises:
        ValueError, RuntimeError: as `Muon`.
    """
    import torch.distributed as dist

    alone = not has_process_group()
    if layout in ("fsdp", "hsdp") and not alone:
        params = _sharded(routes, replicas if layout == "hsdp" else 1, dtype)
    else:
        params = [nn.Parameter(_empty(route.shape, dtype)) for route in routes]
    routes = [dataclasses.replace(route, parameter=param) for route, param in zip(routes, params, strict=True)]
    # A Muon checks the options, and fills in those that its groups lack, as in a run.
    groups = Muon(groups_of(routes, config), **muon_options(config)).param_groups
    partitions = None
    if layout.startswith("zero") and not alone:
        groups, partitions = _partitioned(groups, layout)
    made = StepLayout(
        groups,
        dist.group.WORLD if layout == "ddp" and not alone else None,
        COMM_DTYPES[config.comm_dtype],
        partitions,
        max_batch_bytes=config.max_batch_bytes,
        products_on=ACCELERATOR,
    )
    if made.complaints:
        raise RuntimeError("\n".join(made.complaints))
    return groups, made


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of any shape that has the storage of one number."""
    return torch.zeros((), dtype=dtype, device="cpu").expand(tuple(shape))


def _sharded(routes: Sequence[Route], replicas: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return DTensor parameters, sharded along their first dim over the ranks of a replica."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    ranks = dist.get_world_size()
    placements: list[Placement] = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
    mesh = init_device_mesh("cpu", (ranks,) if replicas == 1 else (replicas, ranks // replicas))
    params = []
    for route in routes:
        rows = -(-route.shape[0] // mesh.size(-1)) if route.shape else 0
        # The whole parameter's; the local tensor is expanded, and its strides are zero.
        stride = torch.empty(route.shape, dtype=dtype, device="meta").stride()
        local = _empty((rows, *route.shape[1:]), dtype)
        dtensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(route.shape), stride=stride
        )
        params.append(nn.Parameter(dtensor))
    return params


def _partitioned(groups: Sequence[dict[str, Any]], layout: str) -> tuple[list[dict[str, Any]], dict[Tensor, Partition]]:
    """Replace parameters by flat partitions, as DeepSpeed does; each sub-group of ZeRO-3 becomes a param group."""
    import torch.distributed as dist

    ranks, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    flat_groups: list[dict[str, Any]] = []
    partitions: dict[Tensor, Partition] = {}

    def add(group: dict[str, Any], size: int, slices: list[Slice]) -> None:
        flat = nn.Parameter(_empty((size,), torch.float32))
        partitions[flat] = Partition(world, 0, slices if group["use_muon"] else [], torch.device("cpu"))
        flat_groups.append({**group, "params": [flat], "param_names": ["flat"]})

    for group in groups:
        texts = views.views_of(group)
        members = [(tuple(p.shape), p.numel(), views.parse(v)) for p, v in zip(group["params"], texts, strict=True)]
        slices: list[Slice] = []
        if layout != "zero3":  # ZeRO-1 and 2 cut the flat group
            unit = _ALIGNMENT * ranks
            size = -(-sum(numel for _, numel, _ in members) // unit) * unit // ranks
            offset = 0
            for shape, numel, view in members:
                slices.append(Slice(shape, Division(numel, size, offset), ranks, view))
                offset += numel
            add(group, size, slices)
            continue
        filled = 0
        for shape, numel, view in members:  # ZeRO-3 cuts each parameter
            size = -(-numel // ranks)
            slices.append(Slice(shape, Division(numel, size, start=filled), ranks, view))
            filled += size
            if filled >= _SUB_GROUP:
                add(group, filled, slices)
                slices, filled = [], 0
        if slices:
            add(group, filled, slices)
    return flat_groups, partitions
