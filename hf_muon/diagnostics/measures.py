"""Measures of updates and directions. Inputs are not modified."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Elements of AdamW's moments to widen to fp32 at a time, which bounds the memory of measuring.
_CHUNK = 2**22


def orthogonality_error(directions: Tensor) -> Tensor:
    """Return how far directions are from orthogonal: ``||X X^T - I||_F / sqrt(s)`` with s = min(m, n).

    Args:
        directions: ``(B, m, n)``, whole; not written to.

    Returns:
        ``(B,)``, fp32: the root mean square of ``singular value^2 - 1``. For an all-zero matrix it is 1.
    """
    x = directions.float()  # products of fp16 would hide the error that is measured
    x = x.mT if x.size(-2) > x.size(-1) else x
    with torch.autocast(x.device.type, enabled=False):
        gram = x @ x.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    error: Tensor = torch.linalg.vector_norm(gram, dim=(-2, -1)) / math.sqrt(gram.size(-1))
    return error


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares of a tensor, in fp32."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.float().square()


def adamw_sum_of_squares(
    exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, betas: Sequence[float], eps: float
) -> Tensor:
    """Return the sum of squares of AdamW's update, without weight decay and before the learning rate multiplies it."""
    count = step.to(exp_avg.device)
    first, second = 1 - betas[0] ** count, 1 - betas[1] ** count
    total = torch.zeros((), dtype=torch.float32, device=exp_avg.device)
    chunks = [torch.split(moment.reshape(-1), _CHUNK) for moment in (exp_avg, exp_avg_sq)]
    for m, v in zip(*chunks, strict=True):
        total += sum_of_squares((m.float() / first) / ((v.float() / second).sqrt() + eps))
    return total
