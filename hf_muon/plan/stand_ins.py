"""Stand-ins for a run on several ranks: parameters without memory, in a process group of ranks that do not exist."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_muon.build import groups_of
from hf_muon.config import COMM_DTYPES, GROUP_OPTIONS, MuonConfig
from hf_muon.diagnostics.log import has_process_group
from hf_muon.optimizer.layout import StepLayout
from hf_muon.plan.parallelism import DENSE, EXPERT, Cuts, Sizes, all_axes, cuts_of
from hf_muon.routing.route import Route
from hf_muon.rules import registry
from hf_muon.storage import views
from hf_muon.storage.partitions import Partition, Slice, partition_bounds
from hf_muon.storage.regions import regions

_SUB_GROUP = 10**9  # elements; DeepSpeed's sub_group_size
_OF_GROUPS = ("momentum_dtype", "adamw_state_dtype", "momentum_offload")
_ALIGNMENT = 2  # elements, to which DeepSpeed pads a group on every rank


@contextlib.contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of a fake process group, in which nothing is sent."""
    import torch.distributed as dist

    if ranks == 1:
        yield
        return
    if not dist.is_available():
        raise RuntimeError("a plan for several ranks needs a torch with torch.distributed, and this one has none")
    if dist.is_initialized():
        raise RuntimeError("a plan pretends to be on other ranks: make it in a process that is in no process group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear what DTensor remembers of its operators: equal meshes of a later process group have other groups."""
    from torch.distributed.tensor import debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def cuts_on(model: nn.Module, sizes: Sizes | None) -> Cuts | None:
    """Return how ranks that do not exist store a model's parameters; None without tensor and expert parallelism.

    Raises:
        ValueError, RuntimeError: see `parallelism.cuts_of`.
    """
    if sizes is None:
        return None
    with fake_ranks(sizes.ranks):
        return cuts_of(model, sizes)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of some shape that takes the memory of one number."""
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def stored_groups(
    routes: Sequence[Route],
    config: MuonConfig,
    layout: str,
    replicas: int,
    dtype: torch.dtype,
    cuts: Cuts | None = None,
) -> tuple[list[dict[str, Any]], dict[Tensor, Partition] | None, Any]:
    """Return param groups as a framework stores their parameters, in the fake process group of this process.

    Args:
        routes: of the model's parameters.
        config: the options of the run.
        layout: one of `step_plan.LAYOUTS`.
        replicas: copies of the model under `hsdp`.
        dtype: of the stored weights.
        cuts: of tensor and expert parallelism; None for layouts without.

    Returns:
        The param groups, the partitions of ZeRO if the layout has them, and the group over which plain parameters are
        replicated.
    """
    import torch.distributed as dist

    if cuts is not None and has_process_group():
        return _groups(routes, _cut(routes, cuts, dtype), config), None, None
    if not has_process_group() or layout == "ddp":
        replicate_group = dist.group.WORLD if has_process_group() else None
        params = [nn.Parameter(_empty(route.shape, dtype)) for route in routes]
        return _groups(routes, params, config), None, replicate_group
    if layout in ("fsdp", "hsdp"):
        return _groups(routes, _sharded(routes, replicas if layout == "hsdp" else 1, dtype), config), None, None
    params = [nn.Parameter(_empty(route.shape, torch.float32)) for route in routes]
    whole = _groups(routes, params, config)
    groups, partitions = _partitioned(whole, layout)
    return groups, partitions, None


def step_layout(
    groups: list[dict[str, Any]],
    partitions: dict[Tensor, Partition] | None,
    replicate_group: Any,
    config: MuonConfig,
    products_on: torch.device,
) -> StepLayout:
    """Return how a step of such groups works, with products on another device.

    Args:
        groups: see `stored_groups`; so are `partitions` and `replicate_group`.
        partitions: of ZeRO.
        replicate_group: over which plain parameters are replicated.
        config: the options of the run.
        products_on: where matrices are orthogonalized.

    Raises:
        RuntimeError: parameters that cannot be stepped.
    """
    layout = StepLayout(
        groups,
        replicate_group,
        config.max_bucket_bytes,
        COMM_DTYPES[config.comm_dtype],
        partitions,
        max_batch_bytes=config.max_batch_bytes,
        products_on=products_on,
    )
    if layout.complaints:
        raise RuntimeError("\n".join(layout.complaints))
    return layout


def _groups(routes: Sequence[Route], params: Sequence[nn.Parameter], config: MuonConfig) -> list[dict[str, Any]]:
    """Return param groups of these parameters, in the form that torch.optim.Optimizer gives them."""
    groups = groups_of([dataclasses.replace(r, parameter=p) for r, p in zip(routes, params, strict=True)], config)
    for group in groups:
        names, members = zip(*group["params"], strict=True)
        group["param_names"], group["params"] = list(names), list(members)
        for name in (*_OF_GROUPS, *registry.option_names()):
            group.setdefault(name, config.value_of(name))
        options = {name: config.value_of(name) for name in GROUP_OPTIONS}
        if text := registry.complaint({**options, **group}):
            raise ValueError(text)
    return groups


def _sharded(routes: Sequence[Route], replicas: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return DTensor parameters, sharded along their first dim over the ranks of a replica."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    ranks = dist.get_world_size()
    placements: list[Placement] = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
    mesh = init_device_mesh("cpu", (ranks,) if replicas == 1 else (replicas, ranks // replicas))
    place = mesh.get_local_rank(mesh.ndim - 1)
    params = []
    for route in routes:
        length = route.shape[0] if route.shape else 0
        each = -(-length // mesh.size(-1))
        rows = min(each, max(0, length - each * place))
        stride = torch.empty(route.shape, device="meta").stride()
        local = _empty((rows, *route.shape[1:]), dtype)
        whole = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(route.shape), stride=stride
        )
        params.append(nn.Parameter(whole))
    return params


def _cut(routes: Sequence[Route], cuts: Cuts, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters as tensor and expert parallelism store them: DTensors, and plain ones where ranks have all."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from hf_muon.distributed.groups import use_group

    sizes, rank, world = cuts.sizes, dist.get_rank(), dist.get_world_size()
    meshes: dict[tuple[str, ...], Any] = {
        axes: init_device_mesh("cpu", sizes.shape(axes), mesh_dim_names=axes) for axes in (DENSE, EXPERT)
    }
    for axes in dict.fromkeys(cuts.of(route.parameter).axes for route in routes):
        members = sizes.members(axes, rank)
        # The ranks of a mesh agree on its group by what they send, and here nobody sends.
        if len(axes) > 1 and len(members) < world:
            use_group(dist.new_group(members, use_local_synchronization=True))
    params = []
    for route in routes:
        cut = cuts.of(route.parameter)
        if not cut.axes:
            params.append(nn.Parameter(_empty(route.shape, dtype)))
            continue
        region = regions(route.shape, sizes.shape(cut.axes), cut.placements)[sizes.places(cut.axes)[rank]]
        whole = DTensor.from_local(
            _empty(region.shape, dtype),
            meshes[all_axes(cut.axes)][cut.axes],
            cut.placements,
            run_check=False,
            shape=torch.Size(route.shape),
            stride=torch.empty(route.shape, device="meta").stride(),
        )
        params.append(nn.Parameter(whole))
    return params


def _partitioned(groups: Sequence[dict[str, Any]], layout: str) -> tuple[list[dict[str, Any]], dict[Tensor, Partition]]:
    """Replace parameters by flat partitions, as DeepSpeed does; each sub-group of ZeRO-3 becomes a param group."""
    import torch.distributed as dist

    ranks, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert world is not None
    flat_groups: list[dict[str, Any]] = []
    partitions: dict[Tensor, Partition] = {}

    def add(group: dict[str, Any], size: int, slices: list[Slice]) -> None:
        flat = nn.Parameter(_empty((size,), torch.float32))
        partitions[flat] = Partition(world, rank, slices if group["use_muon"] else [], torch.device("cpu"))
        flat_groups.append({**group, "params": [flat], "param_names": ["flat"]})

    for group in groups:
        sizes = [param.numel() for param in group["params"]]
        parsed = [views.parse(text) for text in views.views_of(group)]
        if layout != "zero3":
            unit = _ALIGNMENT * ranks
            size = -(-sum(sizes) // unit) * unit // ranks
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            own = [start - rank * size if 0 < start - rank * size < size else 0 for start in starts]
            add(
                group,
                size,
                [
                    Slice(tuple(param.shape), partition_bounds(n, size, ranks, start), place, view)
                    for param, n, start, place, view in zip(group["params"], sizes, starts, own, parsed, strict=True)
                ],
            )
            continue
        slices: list[Slice] = []
        filled = 0
        for i, (param, n, view) in enumerate(zip(group["params"], sizes, parsed, strict=True)):
            size = -(-n // ranks)
            slices.append(Slice(tuple(param.shape), partition_bounds(n, size, ranks), filled, view))
            filled += size
            if filled >= _SUB_GROUP or i + 1 == len(sizes):
                add(group, filled, slices)
                slices, filled = [], 0
    return flat_groups, partitions
