"""The momentum of matrices: an exponential moving average of their gradients.

::

    buffer = momentum * buffer + (1 - momentum) * grad
    update = momentum * buffer + (1 - momentum) * grad      # with nesterov, else the buffer

A step computes in fp32, or in the dtype of a wider parameter. How a value is rounded depends on the value, its block
and the number of the step, and blocks lie within the rows of a matrix, so results do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_muon.math.elementwise import Elementwise, Number, over, shaped_like
from hf_muon.math.moments import BLOCK, MOMENTS, over_blocks
from hf_muon.math.rounding import Salt, salt

BUFFER = "momentum_buffer"
SCALE = MOMENTS[BUFFER].scale
_MOMENT = MOMENTS[BUFFER]


def update_dtype(param: Tensor, momentum_dtype: str = "auto") -> torch.dtype:
    """Return the dtype in which a step computes updates."""
    if momentum_dtype in ("auto", "fp32"):
        return torch.promote_types(param.dtype, torch.float32)
    return torch.float32


def ahead(moved: Tensor, grad: Tensor, rate: Number) -> Tensor:
    """Return the average one step ahead, if the gradient stays the same."""
    return moved - (moved - grad).mul_(rate)


def _moved(buffer: Tensor, grad: Tensor, step_salt: Salt, rate: Number) -> Tensor:
    """Move a buffer towards a gradient by `rate`. Return it in the dtype of the step, before it is rounded."""
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    exact, grad = buffer.to(dtype), grad.to(dtype)
    # Not lerp_, which rounds differently: three operations, each rounded once, are the same bits compiled or not.
    moved = exact.add_((grad - exact).mul_(rate))
    _MOMENT.write_(moved, step_salt, buffer)
    return moved


def _move(buffer: Tensor, grad: Tensor, update: Tensor, step_salt: Salt, rate: Number, *, nesterov: bool) -> None:
    """Move a buffer towards a gradient by `rate`, and compute the update, in its dtype."""
    moved = _moved(buffer, grad, step_salt, rate)
    update.copy_(ahead(moved, grad.to(update.dtype), rate) if nesterov else moved)


def _move_alone(buffer: Tensor, grad: Tensor, step_salt: Salt, rate: Number) -> None:
    """Move a buffer without computing the update."""
    _moved(buffer, grad, step_salt, rate)


def _move_codes(codes: Tensor, scales: Tensor, grad: Tensor, update: Tensor, rate: Number, *, nesterov: bool) -> None:
    """Move a buffer of 8 bits, in blocks ``(R, BLOCK)``, and compute updates from what is stored.

    The scales are ``(R,)``. The update of a piece that cuts through blocks is computed later, when no more is left.
    """
    exact, grad = _MOMENT.read(codes, scales), grad.float()
    _MOMENT.write_(exact.add_((grad - exact).mul_(rate)), None, codes, scales)
    stored = _MOMENT.read(codes, scales)
    update.copy_(ahead(stored, grad, rate) if nesterov else stored)


MOVE = Elementwise(_move, reads=(0, 1), writes=(0, 2))
MOVE_ALONE = Elementwise(_move_alone, reads=(0, 1), writes=(0,))
MOVE_CODES = Elementwise(_move_codes, reads=(0, 1, 2), writes=(0, 1, 3), row=BLOCK, by_row=(1,))


def move_(
    moments: Sequence[Mapping[str, Tensor]],
    grads: Sequence[Tensor],
    *,
    momentum: float,
    nesterov: bool,
    step: int = 0,
    wanted: bool = True,
) -> list[Tensor]:
    """Move momentum towards gradients and return the updates, in few launches.

    The updates lie in memory one after the other, and may be overwritten.

    Args:
        moments: a buffer of each tensor, all of one dtype and device; of 8 bits with whole rows, and with scales.
        grads: tensors of the same shapes.
        momentum: decay of the average.
        nesterov: whether to look one step ahead.
        step: number of the step, which seeds stochastic rounding.
        wanted: whether updates are needed; otherwise none are returned.
    """
    buffers, rate = [stored[BUFFER] for stored in moments], 1 - momentum
    quantized = SCALE in moments[0]
    # Codes need that memory in any case: their gradients are copied into it.
    if not wanted and not quantized:
        over(MOVE_ALONE, [buffers, grads], salt(step), rate)
        return []
    dtype = torch.promote_types(buffers[0].dtype, torch.float32)
    flat = torch.empty(sum(buffer.numel() for buffer in buffers), dtype=dtype, device=buffers[0].device)
    updates = shaped_like(flat, buffers)
    if quantized:
        scales = [stored[SCALE] for stored in moments]
        over_blocks(MOVE_CODES, [buffers, scales, grads, updates], rate, nesterov=nesterov)
    else:
        over(MOVE, [buffers, grads, updates], salt(step), rate, nesterov=nesterov)
    return updates if wanted else []
