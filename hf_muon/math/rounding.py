"""Stochastic rounding of fp32 to bf16, without a generator: random bits are a hash of values and the step.

Rounding to nearest loses every update smaller than half a unit in the last place, which at the learning rates of
fine-tuning are nearly all. Rounding up or down at random, with the probabilities that make the mean the exact value,
loses none on average. Equal values are rounded alike on every rank, in every layout and on every device.

Source: Zamirai et al., Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_ROUNDINGS = ("auto", "nearest", "stochastic")
"""How a step stores its fp32 results in bf16 weights; ``auto`` is ``stochastic``. fp16 weights need ``nearest``."""

_LARGEST_BF16 = torch.finfo(torch.bfloat16).max

Salt = int | Tensor
"""The hash of a step's number, 32 bits; where functions are compiled, an int32 tensor of no dims."""


def is_half(tensor: Tensor) -> bool:
    """Return whether a tensor is of bf16 or fp16, whose weights a step computes in fp32 and rounds."""
    return tensor.dtype.itemsize < 4


def salt(step: int) -> int:
    """Return the hash of a step's number, as a signed number of 32 bits."""
    # 2**32 over the golden ratio, which takes numbers that follow one another far apart.
    mixed = _mixed((step * 0x9E3779B9) & 0xFFFFFFFF)
    return mixed - 2**32 if mixed >= 2**31 else mixed


def salted_bits(values: Tensor, salt: Salt, updates: Tensor | None = None) -> Tensor:
    """Return 32 pseudorandom bits for each fp32 value, as int32: a hash of the value and the step.

    Neither a generator nor a position is involved, so that every rank draws the same bits for the same element.
    The hash function is lowbias32 by Chris Wellons (https://nullprogram.com/blog/2018/07/31/).

    Args:
        values: fp32, of any shape.
        salt: the salt of the step.
        updates: fp32 numbers of the same elements, to be hashed too: equal values with different updates draw different
            bits.
    """
    # torch has few operators for unsigned numbers: factors above 2**31 are written as negative ones, and masks remove
    # the signs that shifts repeat.
    bits = values.view(torch.int32) ^ salt
    if updates is not None:
        bits += updates.view(torch.int32) * (0x9E3779B1 - 2**32)
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= 0x846CA68B - 2**32
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _mixed(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def salted_bf16(values: Tensor, salt: Salt) -> Tensor:
    """Round fp32 values to fp32 values that bf16 can hold, up or down at random, so that the mean is the value.

    Rounding to nearest would lose every change smaller than half a unit in the last place, 1/512 of the value.

    Args:
        values: fp32 and finite, of any shape.
        salt: as in `salted_bits`.
    """
    # Nothing finite is rounded to infinity.
    bounded = values.clamp(-_LARGEST_BF16, _LARGEST_BF16)
    return _with_fewer_bits(bounded, salted_bits(bounded, salt))


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values up or down at random to bf16, so that the mean is the value. NaN stays NaN.

    Args:
        values: fp32, of any shape.
        bits: 32 random bits for each value, as int32. They are overwritten.
    """
    rounded = _with_fewer_bits(values, bits).clamp(-_LARGEST_BF16, _LARGEST_BF16)
    # NaN and infinity stay, and what is too large for bf16; what rounds to its largest value does not exceed it.
    return torch.where(values.bfloat16().isfinite(), rounded, values).bfloat16()


def store_(weights: Tensor, exact: Tensor, updates: Tensor, salt: Salt, *, stochastic: bool) -> None:
    """Store the results of a step in weights, rounded once if these are bf16 or fp16.

    Weights that are equal and have different updates are rounded independently.

    Args:
        weights: any dtype; may be `exact`.
        exact: results, fp32 for bf16 and fp16 weights.
        updates: hashed together with the results; of their dtype.
        salt: the salt of the step.
        stochastic: whether to round to bf16 at random, and not to nearest.
    """
    if weights.dtype is torch.bfloat16 and stochastic:
        exact = round_to_bf16(exact, salted_bits(exact, salt, updates))
    weights.copy_(exact)


def _with_fewer_bits(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values at random to values whose last 16 bits are zero, as those of bf16. Overwrites `bits`."""
    # Adding random last bits carries into the rest with a probability that is what the last bits are worth.
    bits &= 0xFFFF
    bits += values.view(torch.int32)
    bits &= -0x10000
    return bits.view(torch.float32)
