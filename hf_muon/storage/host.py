"""Moments in the host's memory: which ones, and in which kind of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.storage.tensors import local_of, shape_of

OFFLOADS = ("none", "cpu")
SMALLEST = 2**16
"""Moments of fewer elements stay on the device: they are few bytes, and a copy costs a launch whatever its size."""

_PINS = ("cuda", "xpu")
_HAS_NO_HOST = ("cpu", "meta")


def moments_device(param: Tensor, offload: str, shape: Sequence[int] | None = None) -> torch.device:
    """Return the device on which the moments of a parameter are stored.

    Args:
        param: plain or DTensor.
        offload: one of `OFFLOADS`.
        shape: of the whole parameter; None for its own.
    """
    device = local_of(param).device
    numel = math.prod(shape_of(param) if shape is None else shape)
    return torch.device("cpu") if offload == "cpu" and device.type not in _HAS_NO_HOST and numel >= SMALLEST else device


def zeros_like(local: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
    """Return zeros in the host's memory, in pages that do not move if `local`'s device can copy such ones by itself.

    Args:
        local: stored on a device, with the shape and strides of the result.
        dtype: of the result.
        shape: of the result, contiguous; None for that of `local`.
    """
    pinned = local.device.type in _PINS
    if shape is not None:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)
    layout = torch.preserve_format
    return torch.zeros_like(local, dtype=dtype, device="cpu", pin_memory=pinned, memory_format=layout)


def copied(local: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy in the host's memory, in pages that do not move if `device` can copy such ones by itself."""
    copy = torch.empty_like(local, dtype=dtype, device="cpu", pin_memory=device.type in _PINS)
    return copy.copy_(local)
