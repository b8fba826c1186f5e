"""The largest logit of each head of an attention, before the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Visible = Callable[[Tensor], "Tensor | None"]
"""Called with positions of queries ``(B, H, n)``; returns which keys they see, bool, broadcastable to ``(B, H, n, T)``,
or None for all."""

# Logits at a time: 64 MiB in fp32, instead of all, which grow with the square of the sequence.
_BLOCK = 2**24


def largest_logits(query: Tensor, key: Tensor, scale: float, visible: Visible, most_queries: int | None) -> Tensor:
    """Return the largest logit of each head, over all sequences and over the keys to which queries attend.

    Args:
        query: ``(B, H, S, D)``.
        key: ``(B, K, T, D)``; each of the K key heads is shared by H / K consecutive query heads.
        scale: factor of the logits.
        visible: which keys a query attends to.
        most_queries: use only so many queries of largest norm per sequence and head. The result is then at most the
            true maximum. None for all queries.

    Returns:
        ``(H,)``, fp32; -inf for a head whose queries attend to no key.
    """
    batch, heads, length, size = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    largest = torch.full((heads,), -math.inf, dtype=torch.float32, device=query.device)
    if not batch * length * keys:
        return largest
    if most_queries is not None and most_queries < length:
        norms = torch.linalg.vector_norm(query, dim=-1, dtype=torch.float32)
        positions = norms.topk(most_queries, dim=-1, sorted=False).indices
        query = query.gather(2, positions.unsqueeze(-1).expand(-1, -1, -1, size))
    else:
        positions = torch.arange(length, dtype=torch.int64, device=query.device).expand(batch, heads, length)
    step = max(1, _BLOCK // (batch * heads * keys))
    for start in range(0, positions.shape[2], step):
        block = positions[:, :, start : start + step]
        # Rows of heads that share a key are those of one product: (B, K, H / K * n, D) with (B, K, D, T).
        rows = query[:, :, start : start + step].reshape(batch, key_heads, -1, size)
        logits = (rows @ key.mT).view(batch, heads, -1, keys)
        unmasked = visible(block)
        if unmasked is not None:
            logits = logits.masked_fill(~unmasked, -math.inf)
        largest = torch.maximum(largest, logits.amax(dim=(0, 2, 3)).float() * scale)
    return largest
