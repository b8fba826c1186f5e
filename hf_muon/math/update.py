"""Directions applied to weights, elementwise: correct on any piece of a matrix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.math.elementwise import Elementwise, Number, adjacent_runs, over
from hf_muon.math.rounding import Salt, salt, store_

MATCH_RMS = "match_rms_adamw"
ADJUST_LR_FNS = (MATCH_RMS, "original", "spectral_unclamped")
UPDATE_RMS = 0.2


def lr_scale(adjust_lr_fn: str, shape: Sequence[int], update_rms: float = UPDATE_RMS) -> float:
    """Return the factor of a matrix's learning rate.

    Args:
        adjust_lr_fn: the rule.
        shape: the shape of the whole matrix, ``(..., out, in)``.
        update_rms: root mean square of an orthogonal direction times its scale, under ``match_rms_adamw``.

    Sources: ``match_rms_adamw`` from Moonlight (https://arxiv.org/abs/2502.16982), ``original`` from Keller Jordan
    (https://kellerjordan.github.io/posts/muon/), ``spectral_unclamped`` from the spectral condition
    (https://arxiv.org/abs/2310.17813).
    """
    rows, columns = shape[-2:]
    if adjust_lr_fn == MATCH_RMS:
        return update_rms * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    if adjust_lr_fn == "spectral_unclamped":
        return math.sqrt(rows / columns)
    raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is not valid. Valid: {', '.join(ADJUST_LR_FNS)} [invalid-value]")


def check_scale(adjust_lr_fn: str, update_rms: float) -> None:
    """Raise if two options of the scale do not go together.

    Raises:
        ValueError: a constant is set, and the rule has none.
    """
    if adjust_lr_fn != MATCH_RMS and update_rms != UPDATE_RMS:
        raise ValueError(
            f"update_rms={update_rms} is the constant of adjust_lr_fn={MATCH_RMS}; adjust_lr_fn={adjust_lr_fn} has "
            f"none. Leave update_rms out, or use {MATCH_RMS} [unused-update-rms]"
        )


def _apply(
    weights: Tensor, directions: Tensor, step_salt: Salt, keep: Number, factor: Number, *, stochastic: bool
) -> None:
    """Compute ``keep * weights + factor * directions``: in fp32 for bf16 and fp16 weights, which are rounded once."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    moves = directions.to(dtype)
    store_(weights, weights.to(dtype).mul_(keep).add_(moves * factor), moves, step_salt, stochastic=stochastic)


APPLY = Elementwise(_apply, reads=(0, 1), writes=(0,))


def apply_directions_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    rates: Sequence[tuple[float, float]],
    *,
    step: int,
    rounding: str = "auto",
) -> None:
    """Compute ``keep * param + factor * direction`` with the two rates of each parameter, in few launches.

    bf16 and fp16 parameters are computed in fp32 and rounded once.

    Args:
        params: pieces of parameters.
        directions: a direction for each piece, of its shape and on its device.
        rates: two numbers for each piece: ``1 - lr * weight_decay`` and ``-lr * scale``.
        step: number of the step, which seeds stochastic rounding.
        rounding: `weight_rounding` of the param group.
    """
    runs = adjacent_runs(directions)
    for (pair, *_), alike in itertools.groupby(range(len(params)), key=lambda i: (rates[i], params[i].dtype, runs[i])):
        indices = list(alike)
        weights, moves = [params[i] for i in indices], [directions[i] for i in indices]
        over(APPLY, [weights, moves], salt(step), *pair, stochastic=rounding != "nearest")
