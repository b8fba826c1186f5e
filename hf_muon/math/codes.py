"""Numbers in 8 bits: a code for each element, and a scale for each block of a row.

Blocks lie within the rows of a matrix, and codes do not depend on where a block lies. A CPU's may differ from a card's:
torch's square root on a CPU may be off by a unit in the last place. Block-wise scales:
https://arxiv.org/abs/2110.02861; for Muon: https://arxiv.org/abs/2509.23106.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hf_muon.math.rounding import Salt, salted_bits

BLOCK = 64
"""Elements of a row that share a scale."""
SHORTEST = 16
"""Rows shorter than this stay in fp32: their scales would weigh much, and such parameters are few."""


class Code(NamedTuple):
    """What the codes of a block stand for: ``sign(c) * (abs(c) / largest)**power``, times the block's scale.

    Levels are denser near zero.

    Attributes:
        dtype: of the codes.
        largest: code.
        power: 2 or 4.
    """

    dtype: torch.dtype
    largest: int
    power: int

    def fractions(self, codes: Tensor) -> Tensor:
        """Return what codes stand for, from -1 to 1, in fp32."""
        exact = codes.float() * codes.float().abs()
        exact *= 1 / self.largest**2  # a product, as compilers write it; 1 for the largest code, which gives the scale
        return exact.mul_(exact) if self.power == 4 else exact

    def values(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """Return the fp32 values of blocks of codes ``(..., width)`` with scales ``(...)``."""
        return self.fractions(blocks) * scales.unsqueeze(-1)

    def exact_codes(self, fractions: Tensor) -> Tensor:
        """Return the codes of fractions from 0 to 1, before they are rounded. Overwrites the fractions."""
        roots = fractions.sqrt_()
        return (roots.sqrt_() if self.power == 4 else roots).mul_(self.largest)


SQUARES = Code(torch.int8, 127, 2)
"""For averages of gradients, which have a sign, and most of which lie near zero."""
FOURTH_POWERS = Code(torch.uint8, 255, 4)
"""For averages of squared gradients: over nine orders of magnitude, with square roots as dense as `SQUARES`."""


class Quantized(NamedTuple):
    """A tensor as codes, and the largest absolute value of each block of a row.

    Attributes:
        codes: ``(..., n)``, contiguous.
        scales: ``(..., ceil(n / BLOCK))`` fp32, contiguous.
        code: what the codes stand for.
    """

    codes: Tensor
    scales: Tensor
    code: Code = SQUARES

    def values(self) -> Tensor:
        """Return the fp32 values."""
        n = self.codes.shape[-1]
        return self.code.values(_in_blocks(self.codes), self.scales).flatten(-2)[..., :n]

    def store_(self, values: Tensor) -> None:
        """Store values ``(..., n)`` in fp32, each rounded to the nearest level."""
        codes, scales = codes_of(_in_blocks(values), self.code)
        self.scales.copy_(scales.squeeze(-1))
        self.codes.copy_(codes.flatten(-2)[..., : self.codes.shape[-1]])


def codes_of(blocks: Tensor, code: Code, salt: Salt | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks ``(..., width)``, as fp32 numbers, and their scales ``(..., 1)``.

    Args:
        blocks: fp32 and finite.
        code: what the codes stand for.
        salt: of the step, see `rounding.salted_bits`, to round up or down at random, so that the mean is the value;
            None to round to the nearest level.
    """
    fractions = blocks.abs()
    scales = fractions.amax(dim=-1, keepdim=True)
    fractions = fractions / torch.where(scales > 0, scales, 1.0)
    codes = code.exact_codes(fractions.clone())
    if salt is None:
        codes = codes.round()
    else:
        below = codes.floor().clamp(max=code.largest - 1)
        low, high = code.fractions(below), code.fractions(below + 1)
        draws = (salted_bits(blocks, salt) & 0xFFFFFF) * 2.0**-24
        codes = below + (draws * (high - low) < fractions - low)
    if code.dtype.is_signed:
        return codes.copysign(blocks), scales
    return codes.maximum((fractions > 0).to(codes.dtype)), scales  # a moment of zero would not bound the update


def check_blocks(blocks: Tensor) -> None:
    """Tell a compiler that rows ``(R, BLOCK)`` have that length: those of unknown length need memory for the results.

    Args:
        blocks: codes, or what has their shape.
    """
    torch._check(blocks.shape[-1] == BLOCK)  # type: ignore[no-untyped-call]


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of codes: ``(..., ceil(n / BLOCK))`` for ``(..., n)``."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def _in_blocks(rows: Tensor) -> Tensor:
    """View ``(..., n)`` as ``(..., blocks, width)``, padded with zeros if the last block is not full."""
    width = min(BLOCK, rows.shape[-1])
    padded = F.pad(rows, (0, -rows.shape[-1] % width)) if rows.shape[-1] % width else rows
    return padded.reshape(*padded.shape[:-1], -1, width)
