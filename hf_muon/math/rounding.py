"""Stochastic rounding of fp32 to bf16, which needs no generator: random bits are a hash of the value and the step.

The result is the same on every rank, in every layout and on all hardware.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHUNKS = {"cpu": 2**17}  # elements per chunk: they stay in a core's cache
_CHUNK = 2**22  # on other devices
_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def random_bits(values: Tensor, step: int) -> Tensor:
    """Return 32 pseudorandom bits for each fp32 value, as int32: a hash of the value and the step.

    Neither a generator nor a position is involved, so that every rank draws the same bits for the same element.
    The hash function is lowbias32 by Chris Wellons (https://nullprogram.com/blog/2018/07/31/).
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
    """Round fp32 values to fp32 values that bf16 can hold, up or down at random, so that the mean is the value.

    Rounding to nearest would lose every change smaller than half a unit in the last place, 1/512 of the value.

    Args:
        values: fp32 and finite, of any shape.
        step: number of the step.
    """
    bounded = values.clamp(-_LARGEST_BF16, _LARGEST_BF16)  # nothing finite is rounded to infinity
    bits = random_bits(bounded, step)
    bits &= 0xFFFF
    bits += bounded.view(torch.int32)
    bits &= -0x10000
    return bits.view(torch.float32)


def store_bf16_(buffer: Tensor, values: Tensor, step: int) -> None:
    """Store fp32 values in a bf16 buffer of their shape by `round_to_bf16`, in chunks."""
    rows = rows_per_chunk(values, math.prod(values.shape[1:]))
    for target, chunk in zip(torch.split(buffer, rows), torch.split(values, rows), strict=True):
        target.copy_(round_to_bf16(chunk, step))


def rows_per_chunk(tensor: Tensor, columns: int) -> int:
    """Return how many rows of a tensor to work on at once."""
    return max(1, _CHUNKS.get(tensor.device.type, _CHUNK) // max(1, columns))
