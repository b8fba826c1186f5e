"""Stochastic rounding of fp32 to bf16 and fp16, without a generator: random bits are a hash of values and the step.

Equal values are rounded alike on every rank, in every layout and on every device. Which values are computed may depend
on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_CHUNKS = {"cpu": 2**17}  # elements per chunk: they stay in a core's cache
_CHUNK = 2**22  # on other devices
_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def salt(step: int) -> int:
    """Return the hash of a step's number, as a signed number of 32 bits."""
    mixed = _mixed((step * 0x9E3779B9) & 0xFFFFFFFF)
    return mixed - 2**32 if mixed >= 2**31 else mixed


def random_bits(values: Tensor, step: int, others: Tensor | None = None) -> Tensor:
    """Return 32 pseudorandom bits for each fp32 value, as int32: a hash of the value and the step.

    Neither a generator nor a position is involved, so that every rank draws the same bits for the same element.
    The hash function is lowbias32 by Chris Wellons (https://nullprogram.com/blog/2018/07/31/).

    Args:
        values: fp32, of any shape.
        step: number of the step.
        others: fp32 numbers of the same elements, to be hashed too: equal values with different others draw different
            bits.
    """
    return salted_bits(values, salt(step), others)


def salted_bits(values: Tensor, salt: int | Tensor, others: Tensor | None = None) -> Tensor:
    """Return what `random_bits` does, with the salt of the step as a number or an int32 tensor of no dims."""
    bits = values.view(torch.int32) ^ salt
    if others is not None:
        bits += others.view(torch.int32) * (0x9E3779B1 - 2**32)
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
    return salted_bf16(values, salt(step))


def salted_bf16(values: Tensor, salt: int | Tensor) -> Tensor:
    """Return what `round_to_bf16` does, with the salt of the step as a number or an int32 tensor of no dims."""
    bounded = values.clamp(-_LARGEST_BF16, _LARGEST_BF16)  # nothing finite is rounded to infinity
    return _with_fewer_bits(bounded, salted_bits(bounded, salt), 16)


def round_to_half(values: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values up or down at random to bf16 or fp16, so that the mean is the value. NaN stays NaN.

    Args:
        values: fp32, of any shape.
        bits: 32 random bits for each value, as int32. They are overwritten.
        dtype: bf16 or fp16.
    """
    if dtype is torch.bfloat16:
        rounded = _with_fewer_bits(values, bits, 16)
    else:
        # Below 2**-14 the values of fp16 are the multiples of 2**-24.
        steps = values * 2.0**24
        below = steps.floor()
        below += (bits & 0xFFFFFF) < (steps - below) * 2.0**24
        rounded = torch.where(values.abs() < 2.0**-14, below * 2.0**-24, _with_fewer_bits(values, bits, 13))
    return torch.where(values.isnan(), values, rounded).to(dtype)


def _with_fewer_bits(values: Tensor, bits: Tensor, count: int) -> Tensor:
    """Round fp32 values at random to values whose last bits are zero; `count` says how many. Overwrites `bits`."""
    bits &= (1 << count) - 1
    bits += values.view(torch.int32)
    bits &= -(1 << count)
    return bits.view(torch.float32)


def store_bf16_(buffer: Tensor, values: Tensor, step: int) -> None:
    """Store fp32 values in a bf16 buffer of their shape by `round_to_bf16`, in chunks."""
    rows = rows_per_chunk(values, math.prod(values.shape[1:]))
    for target, chunk in zip(torch.split(buffer, rows), torch.split(values, rows), strict=True):
        target.copy_(round_to_bf16(chunk, step))


def batched(parts: Iterable[_T], weights_of: Callable[[_T], Tensor]) -> Iterator[list[_T]]:
    """Yield parts in lists of about a chunk of elements, on one device and in one dtype, which limits temporaries.

    Args:
        parts: consumed one by one, each of at most about a chunk of elements.
        weights_of: returns the weights of a part.
    """
    batch: list[_T] = []
    count = 0
    for part in parts:
        weights = weights_of(part)
        if batch:
            first = weights_of(batch[0])
            is_alike = (first.dtype, first.device) == (weights.dtype, weights.device)
            if not is_alike or count + weights.numel() > chunk_size(weights):
                yield batch
                batch, count = [], 0
        batch.append(part)
        count += weights.numel()
    if batch:
        yield batch


def rows_per_chunk(tensor: Tensor, columns: int) -> int:
    """Return how many rows of a tensor to work on at once."""
    return max(1, chunk_size(tensor) // max(1, columns))


def chunk_size(tensor: Tensor) -> int:
    """Return how many elements to work on at once on a tensor's device."""
    return _CHUNKS.get(tensor.device.type, _CHUNK)
