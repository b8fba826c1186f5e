"""Choose which moments are in the host's memory, and allocate pinned or pageable memory for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.storage.tensors import local_of, shape_of

OFFLOADS = ("none", "cpu")
SMALLEST = 2**16
"""Moments of fewer elements stay on the device: they are few bytes, and a copy costs a launch whatever its size."""

# Devices that copy pinned host memory asynchronously.
_PINS = ("cuda", "xpu")
_HAS_NO_HOST = ("cpu", "meta")


def moments_device(param: Tensor, offload: str) -> torch.device:
    """Return the device on which the moments of a parameter are stored, with one of `OFFLOADS`."""
    device, numel = local_of(param).device, math.prod(shape_of(param))
    return torch.device("cpu") if offload == "cpu" and device.type not in _HAS_NO_HOST and numel >= SMALLEST else device


def asynchronous(device: torch.device) -> Any:
    """Return torch's module of an asynchronous device with streams; None for other devices."""
    module = None if device.type in _HAS_NO_HOST else torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None


def zeros_like(local: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
    """Return zeros in the host's memory, pinned if the device of `local` copies pinned memory asynchronously.

    Args:
        local: stored on a device, with the shape and strides of the result.
        dtype: the dtype of the result.
        shape: the shape of the result, contiguous; None for that of `local`.

    Raises:
        RuntimeError: the host has no such memory left.
    """
    return _empty(local, dtype, local.device, shape).zero_()


def copied(local: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy in the host's memory, pinned if `device` copies pinned memory asynchronously.

    Raises:
        RuntimeError: the host has no such memory left.
    """
    return _empty(local, dtype, device).copy_(local)


def _empty(local: Tensor, dtype: torch.dtype, device: torch.device, shape: Sequence[int] | None = None) -> Tensor:
    pinned = device.type in _PINS
    try:
        if shape is not None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)
        return torch.empty_like(local, dtype=dtype, device="cpu", pin_memory=pinned)
    except RuntimeError as error:
        nbytes = math.prod(local.shape if shape is None else shape) * dtype.itemsize
        raise RuntimeError(
            f"momentum_offload=cpu cannot have {nbytes / 1e6:.3g} MB more of the host's memory"
            f"{', pinned' if pinned else ''}: {error}. Store moments in fewer bytes (momentum_dtype=int8, "
            "adamw_state_dtype=int8), or leave momentum_offload out [host-memory]"
        ) from error
