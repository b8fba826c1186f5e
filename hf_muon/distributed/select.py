"""Which executor serves which matrix: the one place that chooses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_muon.distributed.executor import Executor
from hf_muon.distributed.groups import has_backend
from hf_muon.distributed.local import LocalExecutor
from hf_muon.distributed.units import make_units
from hf_muon.math.elementwise import is_accelerator
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.storage.regions import Stored
from hf_muon.storage.shared import SharedStorage, replicated_regions
from hf_muon.storage.tensors import is_dtensor, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BYTES_UNDER_WAY = 2**31  # for the default of `max_batch_bytes`


def shared_storage(param: Tensor, replicate_group: ProcessGroup | None) -> SharedStorage | None:
    """Return how the ranks of a process group store a parameter, or None if only this process has it.

    Args:
        param: plain or DTensor.
        replicate_group: over which plain parameters are replicated; None if nobody has said that they are.
    """
    if is_dtensor(param):
        from torch.distributed import get_process_group_ranks

        from hf_muon.distributed.groups import mesh_group
        from hf_muon.storage.dtensor import mesh_regions

        group = mesh_group(param.device_mesh)  # type: ignore[attr-defined]
        return SharedStorage(group, mesh_regions(param, get_process_group_ranks(group)))  # type: ignore[arg-type]
    if replicate_group is None or replicate_group.size() == 1:
        return None
    return SharedStorage(replicate_group, replicated_regions(tuple(param.shape), replicate_group.size()))


def accelerator() -> torch.device:
    """Return the accelerator that this process uses.

    Raises:
        RuntimeError: there is none.
    """
    if not torch.accelerator.is_available():
        raise RuntimeError("a device mesh of an accelerator needs one, and torch sees none [no-accelerator]")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())  # type: ignore[union-attr]


def model_device(param: Tensor) -> torch.device:
    """Return the device on which the model computes with a parameter; with FSDP2's CPU offload, its mesh's device."""
    local = local_of(param)
    kind = param.device_mesh.device_type if is_dtensor(param) else local.device.type  # type: ignore[attr-defined]
    return local.device if kind == local.device.type else accelerator()


def comm_device(group: ProcessGroup, device: torch.device, model_device: torch.device) -> torch.device:
    """Return the device to communicate from: `device` if the group has a backend for it, else `model_device`."""
    return device if has_backend(group, device.type) else model_device


def select_executors(
    shapes: Sequence[tuple[int, ...]],
    storages: Sequence[SharedStorage | Stored],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    model_devices: Sequence[torch.device],
    *,
    comm_dtype: torch.dtype | None = None,
    max_batch_bytes: int = MAX_BATCH_BYTES,
    sides: Sequence[Hashable] | None = None,
) -> list[Executor]:
    """Return executors that together serve the matrices of a param group.

    Args:
        shapes: whole shapes, ``(m, n)`` of matrices and ``(B, m, n)`` of stacks.
        storages: for each of them, how the ranks of a group store it, or what this process stores if it has it alone.
        dtypes: of its updates.
        devices: on which it is orthogonalized.
        model_devices: on which the model computes with it.
        comm_dtype: dtype in which updates travel; None for their own.
        max_batch_bytes: bound on the memory of what an accelerator orthogonalizes at once. What travels at once is
            bounded in proportion, by 2 GiB for the default.
        sides: what must be equal for matrices to share a unit, too; None for nothing.
    """
    kinds: list[Hashable] = [
        (storage.group if isinstance(storage, SharedStorage) else None, device, dtype, side)
        for storage, device, dtype, side in zip(storages, devices, dtypes, sides or [False] * len(shapes), strict=True)
    ]
    units = make_units(shapes, kinds, [is_accelerator(device) for device in devices], max_batch_bytes)
    executors: list[Executor] = []
    for kind in dict.fromkeys(kinds):
        of_kind = [unit for unit in units if kinds[unit.ranges[0].matrix] == kind]
        first = kinds.index(kind)
        storage, device = storages[first], devices[first]
        if not isinstance(storage, SharedStorage):
            stored = {i: s for i, s in enumerate(storages) if kinds[i] == kind and not isinstance(s, SharedStorage)}
            executors.append(LocalExecutor(of_kind, stored, device, max_batch_bytes))
            continue
        from hf_muon.distributed.exchange import Exchange
        from hf_muon.distributed.holdings import Holdings

        regions = {i: s.regions for i, s in enumerate(storages) if kinds[i] == kind and isinstance(s, SharedStorage)}
        holdings = Holdings(regions, storage.group.size())
        dtype = comm_dtype or dtypes[first]
        travels_on = comm_device(storage.group, device, model_devices[first])
        most = max(1, _BYTES_UNDER_WAY * max_batch_bytes // MAX_BATCH_BYTES)
        executors.append(Exchange(storage.group, of_kind, holdings, dtype, device, travels_on, most))
    return executors
