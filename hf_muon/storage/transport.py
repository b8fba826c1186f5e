"""Copies between devices, in batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.math.elementwise import adjacent, adjacent_runs, shaped_like


def asynchronous(device: torch.device) -> Any:
    """Return torch's module of an asynchronous device with streams; None for other devices."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None


def on_devices_of(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the devices of other tensors; neighbours in memory are copied together.

    The host waits for a device once, not for each copy. torch copies into pinned memory, of which it keeps some.

    Args:
        tensors: to copy; returned as they are if all are on the right device.
        targets: equally many tensors, each on the device to copy to.
    """
    if all(tensor.device == target.device for tensor, target in zip(tensors, targets, strict=True)):
        return list(tensors)
    runs = adjacent_runs(tensors)
    copies: list[tuple[Tensor, list[Tensor]]] = []
    for (device, _), alike in itertools.groupby(range(len(tensors)), key=lambda i: (targets[i].device, runs[i])):
        members = [tensors[i] for i in alike]
        flat = adjacent(members)
        if flat is None:
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
        copies.append((flat.to(device, non_blocking=asynchronous(flat.device) is not None), members))
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        if (module := asynchronous(device)) is not None:
            module.current_stream(device).synchronize()
    return [tensor for flat, members in copies for tensor in shaped_like(flat, members)]
