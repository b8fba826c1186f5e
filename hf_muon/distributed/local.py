"""Parameters stored whole: one process, and DDP, where every rank takes the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.distributed.base import NewtonSchulz


class LocalExecutor:
    """Stacks matrices of equal shape, so that one batched product serves many small matrices.

    Args:
        max_batch_bytes: size of a stack of fp32 updates; a step needs about six times that besides. A single larger
            parameter is a batch of its own.
    """

    def __init__(self, max_batch_bytes: int = 64 * 2**20) -> None:
        self.max_batch_bytes = max_batch_bytes

    def plan(self, params: Sequence[Tensor]) -> list[list[int]]:
        """Parameters of equal matrix shape, dtype and device, in their order, at most `max_batch_bytes` of fp32."""
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
        for i, param in enumerate(params):
            alike.setdefault((param.shape[-2:], param.dtype, param.device), []).append(i)
        batches: list[list[int]] = []
        for indices in alike.values():
            size = self.max_batch_bytes
            for i in indices:
                if size + params[i].numel() * 4 > self.max_batch_bytes:
                    batches.append([])
                    size = 0
                batches[-1].append(i)
                size += params[i].numel() * 4
        return batches

    def orthogonalize(self, updates: Sequence[Tensor], newton_schulz: NewtonSchulz) -> list[Tensor]:
        """Directions of ``(m, n)`` matrices and ``(B, m, n)`` stacks of them, all of one batch of `plan`."""
        if not updates:
            return []
        stacks = [update.view(-1, *update.shape[-2:]) for update in updates]  # each (b, m, n)
        batch = stacks[0] if len(stacks) == 1 else torch.cat(stacks)  # (B, m, n)
        parts = torch.split(newton_schulz(batch), [len(stack) for stack in stacks])
        return [part.view(update.shape) for part, update in zip(parts, updates, strict=True)]
