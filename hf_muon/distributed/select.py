"""Which executor serves which parameter: the one place that chooses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_muon.distributed.executor import Executor
from hf_muon.distributed.groups import carries
from hf_muon.distributed.local import LocalExecutor
from hf_muon.distributed.units import make_units
from hf_muon.storage.regions import Stored
from hf_muon.storage.shared import Shared, replicated_regions
from hf_muon.storage.tensors import is_dtensor, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shared(param: Tensor, replicate_group: ProcessGroup | None) -> Shared | None:
    """Who stores a parameter besides this rank; None for a plain parameter that nobody has said to be replicated.

    Args:
        param: plain or DTensor.
        replicate_group: over which plain parameters are replicated.
    """
    if is_dtensor(param):
        from torch.distributed import get_process_group_ranks

        from hf_muon.distributed.groups import mesh_group
        from hf_muon.storage.dtensor import mesh_regions

        group = mesh_group(param.device_mesh)  # type: ignore[attr-defined]
        return Shared(group, mesh_regions(param, get_process_group_ranks(group)))  # type: ignore[arg-type]
    if replicate_group is None or replicate_group.size() == 1:
        return None
    return Shared(replicate_group, replicated_regions(tuple(param.shape), replicate_group.size()))


def accelerator() -> torch.device:
    """The accelerator that this process uses.

    Raises:
        RuntimeError: there is none.
    """
    if not torch.accelerator.is_available():
        raise RuntimeError("offload_compute=accelerator needs an accelerator, and torch sees none. Use auto or cpu")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())  # type: ignore[union-attr]


def compute_device(stored: torch.device, home: torch.device, offload_compute: str) -> torch.device:
    """Where a matrix is orthogonalized.

    Args:
        stored: where its momentum lives.
        home: where the model computes; another one where the momentum is offloaded.
        offload_compute: `auto`, `cpu` or `accelerator`, for momentum that lives on the CPU.

    Raises:
        RuntimeError: an accelerator is asked for, and there is none.
    """
    if stored.type != "cpu" or offload_compute == "auto":
        return home
    if offload_compute == "cpu":
        return stored
    return home if home.type != "cpu" else accelerator()


def model_device(param: Tensor) -> torch.device:
    """Where a model computes with a parameter: FSDP2's CPU offload keeps it elsewhere than its mesh says."""
    local = local_of(param)
    kind = param.device_mesh.device_type if is_dtensor(param) else local.device.type  # type: ignore[attr-defined]
    return local.device if kind == local.device.type else accelerator()


def carrier(group: ProcessGroup, device: torch.device, home: torch.device) -> torch.device:
    """The device between whose memories a group sends what is computed on another one."""
    return device if carries(group, device.type) else home


def select_executors(
    shapes: Sequence[tuple[int, ...]],
    places: Sequence[Shared | Stored],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    homes: Sequence[torch.device],
    *,
    max_bucket_bytes: int,
    comm_dtype: torch.dtype | None = None,
) -> list[Executor]:
    """Executors that together serve the parameters of a group.

    Args:
        shapes: whole shapes, ``(m, n)`` of matrices and ``(B, m, n)`` of stacks.
        places: of each parameter, as by `shared`; where nobody shares it, all of it as it is stored here.
        dtypes: of each parameter's updates.
        devices: where each parameter is orthogonalized.
        homes: where the model computes with it.
        max_bucket_bytes: bound on bytes in flight.
        comm_dtype: dtype in which updates travel; None for their own.
    """
    kinds: list[Hashable] = [
        (place.group if isinstance(place, Shared) else None, device, dtype)
        for place, device, dtype in zip(places, devices, dtypes, strict=True)
    ]
    units = make_units(shapes, kinds)
    executors: list[Executor] = []
    for kind in dict.fromkeys(kinds):
        mine = [unit for unit in units if kinds[unit.runs[0].matrix] == kind]
        first = kinds.index(kind)
        place, device = places[first], devices[first]
        if not isinstance(place, Shared):
            own = {i: p for i, p in enumerate(places) if kinds[i] == kind and not isinstance(p, Shared)}
            executors.append(LocalExecutor(mine, own, device))
            continue
        from hf_muon.distributed.exchange import Exchange
        from hf_muon.distributed.holdings import Holdings

        regions = {i: p.regions for i, p in enumerate(places) if kinds[i] == kind and isinstance(p, Shared)}
        storage = Holdings(regions, place.group.size())
        wire = comm_dtype or dtypes[first]
        travels = carrier(place.group, device, homes[first])
        executors.append(Exchange(place.group, mine, storage, wire, device, travels, max_bucket_bytes))
    return executors
