"""Directions applied to weights, elementwise: correct on any piece of a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ADJUST_LR_FNS = ("match_rms_adamw", "original", "rms_to_rms")


def lr_scale(adjust_lr_fn: str, shape: Sequence[int]) -> float:
    """Return the factor of a matrix's learning rate; ``shape`` is the whole matrix's ``(..., out, in)``.

    Sources: ``match_rms_adamw`` from Moonlight (https://arxiv.org/abs/2502.16982), ``original`` from Keller Jordan
    (https://kellerjordan.github.io/posts/muon/), ``rms_to_rms`` from the spectral condition
    (https://arxiv.org/abs/2310.17813).
    """
    rows, columns = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    if adjust_lr_fn == "rms_to_rms":
        return math.sqrt(rows / columns)
    raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is not valid. Valid: {', '.join(ADJUST_LR_FNS)}")


def apply_directions_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    scales: Sequence[float],
) -> None:
    """Apply decoupled weight decay, then ``param -= lr * scale * direction``.

    bf16 and fp16 parameters are computed in fp32 and rounded once. The directions are overwritten.
    """
    full: list[int] = []
    half: list[int] = []
    for i, param in enumerate(params):
        (half if param.dtype.itemsize < 4 else full).append(i)
    if full:
        weights = [params[i] for i in full]
        moves = [directions[i].to(params[i]) for i in full]  # from where they were computed to where they are stored
        torch._foreach_mul_(moves, [-lr * scales[i] for i in full])
        if weight_decay:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, moves)
    for i in half:
        exact = params[i].float().mul_(1 - lr * weight_decay)
        params[i].copy_(exact.add_(directions[i].to(exact.device), alpha=-lr * scales[i]))
