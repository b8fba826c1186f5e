"""Parameters stored whole: one process, and DDP, where every rank takes the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_muon.distributed.base import NewtonSchulz


class LocalExecutor:
    """Stacks matrices of equal shape, so that one batched product serves many small matrices.

    Args:
        max_batch_bytes: size of a stack of updates. A single larger parameter is a batch of its own.
    """

    def __init__(self, max_batch_bytes: int = 256 * 2**20) -> None:
        self.max_batch_bytes = max_batch_bytes

    def orthogonalize(self, updates: Sequence[Tensor], newton_schulz: NewtonSchulz) -> list[Tensor]:
        """Directions of ``(m, n)`` matrices and ``(B, m, n)`` stacks of matrices. See `Executor`."""
        directions: list[Tensor | None] = [None] * len(updates)
        for indices in self._batches(updates):
            shape = updates[indices[0]].shape[-2:]
            stacks = [updates[i].reshape(-1, *shape) for i in indices]  # each (b, m, n)
            batch = stacks[0] if len(stacks) == 1 else torch.cat(stacks)  # (B, m, n)
            parts = torch.split(newton_schulz(batch), [len(stack) for stack in stacks])
            for i, part in zip(indices, parts, strict=True):
                directions[i] = part.view(updates[i].shape)
        return [direction for direction in directions if direction is not None]

    def _batches(self, updates: Sequence[Tensor]) -> Iterator[list[int]]:
        """Indices of updates of equal matrix shape, dtype and device, in their order, at most `max_batch_bytes`."""
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
        for i, update in enumerate(updates):
            alike.setdefault((update.shape[-2:], update.dtype, update.device), []).append(i)
        for indices in alike.values():
            batch: list[int] = []
            size = 0
            for i in indices:
                if batch and size + updates[i].nbytes > self.max_batch_bytes:
                    yield batch
                    batch, size = [], 0
                batch.append(i)
                size += updates[i].nbytes
            yield batch
