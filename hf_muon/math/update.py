"""Directions applied to weights, elementwise: correct on any piece of a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.math import weight_rounding
from hf_muon.math.weight_rounding import Observer, Result, is_half

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
    step: int,
    rounding: str = "auto",
    observer: Observer | None = None,
) -> None:
    """Apply decoupled weight decay, then ``param -= lr * scale * direction``.

    bf16 and fp16 parameters are computed in fp32 and rounded once. The directions are overwritten.

    Args:
        params: pieces of parameters.
        directions: of these pieces.
        lr: learning rate.
        weight_decay: decoupled from the gradient.
        scales: of the directions, as `lr_scale` returns them.
        step: number of the step, which seeds stochastic rounding.
        rounding: `weight_rounding` of the param group.
        observer: of what is rounded.
    """
    full: list[int] = []
    half: list[int] = []
    for i, param in enumerate(params):
        (half if is_half(param) else full).append(i)
    if full:
        weights = [params[i] for i in full]
        moves = [directions[i].to(params[i]) for i in full]  # from where they were computed to where they are stored
        torch._foreach_mul_(moves, [-lr * scales[i] for i in full])
        if weight_decay:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, moves)

    def result(i: int) -> Result:
        exact = params[i].float().mul_(1 - lr * weight_decay)
        move = directions[i].to(exact)
        return Result(params[i], exact.add_(move, alpha=-lr * scales[i]), move)

    weight_rounding.store_(map(result, half), rounding, step, observer)
