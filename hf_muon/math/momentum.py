"""How momentum is kept between steps: in fp32, in bf16 with stochastic rounding, or as int8 in blocks.

Whichever it is, a step computes in fp32. How a value is rounded depends on itself, on its block and on the number of
the step, and blocks lie within the rows of a matrix, so that every layout rounds as one process does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

MOMENTUM_DTYPES = ("auto", "fp32", "bf16", "int8")
BLOCK = 64
"""Elements of a row that share a scale."""
SHORTEST = 16
"""Rows shorter than this stay in fp32: a scale for each would weigh much, and such weights are few."""
_LEVELS = 127
_CHUNKS = {"cpu": 2**17}  # elements that are worked on at once: they stay in a core's cache
_CHUNK = 2**22  # elsewhere
_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def update_dtype(param: Tensor, choice: str = "auto") -> torch.dtype:
    """In which a step computes: fp32, also under half precision parameters, whose eight bits would swallow most of a
    step's gradient.
    """
    return torch.promote_types(param.dtype, torch.float32) if choice in ("auto", "fp32") else torch.float32


def momentum_dtype(param: Tensor, choice: str = "auto", shape: Sequence[int] | None = None) -> torch.dtype:
    """In which momentum is kept.

    Args:
        param: the parameter.
        choice: one of `MOMENTUM_DTYPES`.
        shape: of the whole parameter, where `param` does not have it.
    """
    if choice == "bf16":
        return torch.bfloat16
    if choice == "int8" and is_quantized(choice, param.shape if shape is None else shape):
        return torch.int8
    return update_dtype(param, choice)


def is_quantized(choice: str, shape: Sequence[int]) -> bool:
    """Whether the momentum of a parameter of this shape is kept as int8."""
    return choice == "int8" and len(shape) >= 2 and shape[-1] >= SHORTEST


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a momentum of this shape: ``(..., n)`` has ``(..., ceil(n / BLOCK))``."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def state_bytes(param: Tensor, choice: str, shape: Sequence[int]) -> int:
    """Bytes of the momentum of a parameter, or of a shard of it, of this shape."""
    nbytes = math.prod(shape) * momentum_dtype(param, choice).itemsize
    return nbytes + 4 * math.prod(scale_shape(shape)) if is_quantized(choice, param.shape) else nbytes


def random_bits(values: Tensor, step: int) -> Tensor:
    """32 bits for each fp32 value, as int32, that look random and follow from the value and the step.

    Neither a generator nor a position is involved: whoever holds the element, whatever was drawn before, gets the same.
    The mixing function is lowbias32 of Chris Wellons (https://nullprogram.com/blog/2018/07/31/).
    """
    salt = _mixed((step * 0x9E3779B9) & 0xFFFFFFFF)
    bits = values.view(torch.int32) ^ (salt - 2**32 if salt >= 2**31 else salt)
    bits ^= (bits >> 16) & 0xFFFF  # shifts of signed numbers repeat the sign
    bits *= 0x7FEB352D
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= 0x846CA68B - 2**32
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _mixed(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def round_to_bf16(values: Tensor, step: int) -> Tensor:
    """fp32 values that bf16 holds, rounded up or down with the chances that make their mean the value.

    Rounding to nearest would lose what a step adds wherever that is below half of a 256th of the value.

    Args:
        values: fp32 and finite, of any shape.
        step: number of the step.
    """
    kept = values.clamp(-_LARGEST_BF16, _LARGEST_BF16)  # nothing finite is rounded to infinity
    noise = random_bits(kept, step)
    noise &= 0xFFFF
    noise += kept.view(torch.int32)
    noise &= -0x10000
    return noise.view(torch.float32)


def store_bf16_(buffer: Tensor, values: Tensor, step: int) -> None:
    """Keep fp32 values in a bf16 buffer of their shape, by `round_to_bf16`, some at a time."""
    rows = _rows(values, math.prod(values.shape[1:]))
    for kept, some in zip(torch.split(buffer, rows), torch.split(values, rows), strict=True):
        kept.copy_(round_to_bf16(some, step))


def _rows(tensor: Tensor, columns: int) -> int:
    return max(1, _CHUNKS.get(tensor.device.type, _CHUNK) // max(1, columns))


class Quantized(NamedTuple):
    """Momentum as signed codes, and the largest absolute value of each block of a row.

    A code `c` of a block of scale `s` stands for ``sign(c) * (c / 127)**2 * s``: steps are finer near zero, where most
    of a momentum is. Nothing but exact arithmetic and square roots is needed, which round alike on all hardware.
    Block-wise scales: https://arxiv.org/abs/2110.02861; for Muon: https://arxiv.org/abs/2509.23106.

    Attributes:
        codes: ``(..., n)`` int8, contiguous.
        scales: ``(..., ceil(n / BLOCK))`` fp32, contiguous.
    """

    codes: Tensor
    scales: Tensor

    def values(self, part: slice | None = None) -> Tensor:
        """What it stands for, in fp32, or some of it along the first dim."""
        codes, scales = (self.codes, self.scales) if part is None else (self.codes[part], self.scales[part])
        n = codes.shape[-1]
        exact = codes.float()
        exact *= exact.abs()
        exact /= _LEVELS**2  # not the scales, of which the largest codes give just the value
        found = _in_blocks(exact) * scales.unsqueeze(-1)
        return found.flatten(-2)[..., :n]

    def store_(self, values: Tensor) -> None:
        """Keep other values, ``(..., n)`` fp32, rounded to the nearest."""
        n = values.shape[-1]
        blocks = _in_blocks(values)  # (..., blocks, width)
        scales = blocks.abs().amax(dim=-1)
        self.scales.copy_(scales)
        found = blocks.abs()
        found /= torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
        found.sqrt_().mul_(_LEVELS).round_().copysign_(blocks)
        self.codes.copy_(found.flatten(-2)[..., :n])

    def move_(self, grad: Tensor, momentum: float) -> None:
        """Move the average towards a gradient ``(..., n)``, some rows at a time."""
        if not self.codes.numel():
            return
        rows = [part.reshape(-1, part.shape[-1]) for part in (self.codes, self.scales, grad)]
        size = _rows(self.codes, self.codes.shape[-1])
        for codes, scales, some in zip(*(torch.split(part, size) for part in rows), strict=True):
            kept = Quantized(codes, scales)
            kept.store_(kept.values().lerp_(some.float(), 1 - momentum))


def _in_blocks(rows: Tensor) -> Tensor:
    """``(..., n)`` as ``(..., blocks, width)``, with zeros at the end where they do not fill the last one."""
    width = min(BLOCK, rows.shape[-1])
    whole = F.pad(rows, (0, -rows.shape[-1] % width)) if rows.shape[-1] % width else rows
    return whole.reshape(*whole.shape[:-1], -1, width)
