"""The one seam between mathematics and storage: pieces of updates in, pieces of directions out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

NewtonSchulz = Callable[[Tensor], Tensor]
"""Whole matrices ``(B, m, n)`` to their directions ``(B, m, n)``."""


class Executor(Protocol):
    """Brings the pieces of matrices together, has them orthogonalized, and takes the directions apart again."""

    def plan(self, params: Sequence[Tensor]) -> list[list[int]]:
        """Which parameters to step together, as indices; what a step holds in memory at once."""
        ...

    def orthogonalize(self, updates: Sequence[Tensor], newton_schulz: NewtonSchulz) -> list[Tensor]:
        """Directions of the updates, each of its update's shape, in their order. Updates are not written to."""
        ...


def storage_complaint(param: Tensor) -> str | None:
    """Why this version cannot step a parameter as it is stored, and what to do; None where it can."""
    tensor_module = sys.modules.get("torch.distributed.tensor")
    if tensor_module is not None and isinstance(param, tensor_module.DTensor):
        return (
            "is a DTensor (FSDP2, HSDP or tensor parallel), which this version of hf_muon does not shard Newton-Schulz "
            "over. Train on one process or with DDP"
        )
    if getattr(param, "_is_flat_param", False) or hasattr(param, "_fsdp_flattened"):
        return "is a flat FSDP1 parameter, in which matrices have lost their shape. Train on one process or with DDP"
    if hasattr(param, "ds_id"):
        return (
            "is partitioned by DeepSpeed ZeRO-3, which this version of hf_muon does not step. Train on one process or "
            "with DDP, without a DeepSpeed config"
        )
    if param.is_sparse or param.is_complex() or not param.is_floating_point():
        return f"has dtype {param.dtype} and layout {param.layout}; Muon and AdamW step dense floating point tensors"
    return None
