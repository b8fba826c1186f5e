"""Which exchange serves which matrix, and where: the one place that chooses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_muon.distributed.exchange import Exchange
from hf_muon.distributed.groups import has_backend
from hf_muon.distributed.holdings import Holdings
from hf_muon.distributed.units import make_units
from hf_muon.math.elementwise import is_accelerator, most_elements
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.storage.boxes import Held
from hf_muon.storage.shared import SharedStorage, replicated_regions
from hf_muon.storage.tensors import is_dtensor, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BYTES_UNDER_WAY = 2**31  # for the default of `max_batch_bytes`


def shared_storage(param: Tensor, replicate_group: ProcessGroup | None) -> SharedStorage | None:
    """Return how the ranks of a process group store a parameter; None if only this process has it.

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


def exchanges_of(
    shapes: Sequence[tuple[int, ...]],
    groups: Sequence[ProcessGroup | None],
    held: Sequence[Sequence[Held]],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    model_devices: Sequence[torch.device],
    *,
    comm_dtype: torch.dtype | None = None,
    max_batch_bytes: int = MAX_BATCH_BYTES,
    sides: Sequence[Hashable] | None = None,
) -> list[Exchange]:
    """Return exchanges that together serve the matrices of a param group.

    Args:
        shapes: whole shapes, ``(m, n)`` of matrices and ``(B, m, n)`` of stacks.
        groups: the ranks that store each of them; None for this process alone.
        held: what each of these ranks stores.
        dtypes: of its updates.
        devices: on which it is orthogonalized.
        model_devices: on which the model computes with it.
        comm_dtype: dtype in which updates travel; None for their own.
        max_batch_bytes: bound on the memory of what an accelerator orthogonalizes at once. What travels at once is
            bounded in proportion, by 2 GiB for the default.
        sides: what must be equal for matrices to share a unit, too; None for nothing.
    """
    kinds: list[Hashable] = [*zip(groups, devices, dtypes, sides or [False] * len(shapes), strict=True)]
    units = make_units(shapes, kinds, [is_accelerator(device) for device in devices], max_batch_bytes)
    exchanges: list[Exchange] = []
    for kind in dict.fromkeys(kinds):
        of_kind = [unit for unit in units if kinds[unit.ranges[0].matrix] == kind]
        first = kinds.index(kind)
        group, device = groups[first], devices[first]
        of_kind_held = {i: own for i, own in enumerate(held) if kinds[i] == kind}
        holdings = Holdings(of_kind_held, 1 if group is None else group.size())
        if group is None:
            dtype, travels_on, small = dtypes[first], device, _elements_alone(device, max_batch_bytes)
        else:
            dtype, travels_on, small = (
                comm_dtype or dtypes[first],
                comm_device(group, device, model_devices[first]),
                None,
            )
        most = max(1, _BYTES_UNDER_WAY * max_batch_bytes // MAX_BATCH_BYTES)
        exchanges.append(Exchange(group, of_kind, holdings, dtype, device, travels_on, most, small))
    return exchanges


def _elements_alone(device: torch.device, max_batch_bytes: int) -> int:
    """Return how many elements a process that is alone steps together: on accelerators many, in few launches."""
    if not is_accelerator(device):
        return 0
    # Updates in fp32, and first copies of small tensors, then directions of two bytes.
    return min(most_elements(max_batch_bytes), max_batch_bytes // 6)
