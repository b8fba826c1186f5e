"""Numbers in 8 bits: a code for each element, and a scale for each block of a row.

Blocks lie within the rows of a matrix, and codes do not depend on where a block lies. A CPU's may differ from a card's:
torch's square root on a CPU may be off by a unit in the last place. Block-wise scales:
https://arxiv.org/abs/2110.02861; for Muon: https://arxiv.org/abs/2509.23106.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hf_muon.math import compiler
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.rounding import random_bits, rows_per_chunk, salted_bits

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

    def exact_codes(self, fractions: Tensor) -> Tensor:
        """Return the codes of fractions from 0 to 1, before they are rounded. Overwrites the fractions."""
        roots = fractions.sqrt_()
        return (roots.sqrt_() if self.power == 4 else roots).mul_(self.largest)


SQUARES = Code(torch.int8, 127, 2)
"""For averages of gradients, which have a sign, and most of which lie near zero."""
FOURTH_POWERS = Code(torch.uint8, 255, 4)
"""For averages of squared gradients: over nine orders of magnitude, with square roots as dense as `SQUARES`."""


class Cut(Protocol):
    """Some rows or columns of a stored tensor."""

    @property
    def dim(self) -> int: ...

    def of(self, stored: Tensor, /) -> Tensor: ...


class Piece(Protocol):
    """A part of what this rank stores of a matrix: some matrices of a stack, and of these some rows or columns."""

    @property
    def matrix(self) -> int: ...

    @property
    def local(self) -> slice | None: ...

    @property
    def cut(self) -> Cut | None: ...

    def of(self, local: Tensor, /) -> Tensor: ...


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

    def values(self, part: slice | None = None) -> Tensor:
        """Return the fp32 values, or a slice of them along the first dim."""
        codes, scales = (self.codes, self.scales) if part is None else (self.codes[part], self.scales[part])
        n = codes.shape[-1]
        values = _in_blocks(self.code.fractions(codes)) * scales.unsqueeze(-1)
        return values.flatten(-2)[..., :n]

    def values_of(self, piece: Piece) -> Tensor:
        """Return the fp32 values of a piece."""
        if piece.cut is None or piece.cut.dim < self.codes.ndim - 1:
            return Quantized(piece.of(self.codes), piece.of(self.scales), self.code).values()
        return piece.cut.of(self.values(piece.local))  # columns cut through blocks

    def store_(self, values: Tensor) -> None:
        """Store values ``(..., n)`` in fp32, each rounded to the nearest level."""
        blocks, fractions = self._rescaled_(values)
        codes = self.code.exact_codes(fractions.clone()).round_()
        self._store_codes_(codes, blocks, fractions)

    def store_rounded_(self, values: Tensor, step: int) -> None:
        """Store values ``(..., n)`` in fp32, each rounded up or down at random, so that the mean is the value.

        Args:
            values: finite.
            step: its number seeds the hash of the values, as in `rounding.random_bits`.
        """
        blocks, fractions = self._rescaled_(values)
        below = self.code.exact_codes(fractions.clone()).floor_().clamp_(max=self.code.largest - 1)
        low, high = self.code.fractions(below), self.code.fractions(below + 1)
        draws = (random_bits(blocks, step) & 0xFFFFFF) * 2.0**-24
        below += draws * (high - low) < fractions - low
        self._store_codes_(below, blocks, fractions)

    def _rescaled_(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the scales of values. Return the values in blocks ``(..., blocks, width)``, and their fractions."""
        blocks = _in_blocks(values)
        fractions = blocks.abs()
        scales = fractions.amax(dim=-1)
        self.scales.copy_(scales)
        fractions /= torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
        return blocks, fractions

    def _store_codes_(self, codes: Tensor, blocks: Tensor, fractions: Tensor) -> None:
        if self.code.dtype.is_signed:
            codes.copysign_(blocks)
        else:
            codes.clamp_min_((fractions > 0).to(codes.dtype))  # a second moment of zero would not bound the update
        self.codes.copy_(codes.flatten(-2)[..., : self.codes.shape[-1]])


def salted_codes(values: Tensor, salt: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Return what `Quantized.store_rounded_` stores: codes ``(R, BLOCK)``, as fp32 numbers, and scales ``(R, 1)``.

    Args:
        values: ``(R, BLOCK)`` fp32 and finite.
        salt: of the step, int32 of no dims.
        code: what the codes stand for.
    """
    fractions = values.abs()
    scales = fractions.amax(dim=-1, keepdim=True)
    fractions = fractions / torch.where(scales > 0, scales, 1.0)
    below = code.exact_codes(fractions.clone()).floor().clamp(max=code.largest - 1)
    low, high = code.fractions(below), code.fractions(below + 1)
    draws = (salted_bits(values, salt) & 0xFFFFFF) * 2.0**-24
    codes = below + (draws * (high - low) < fractions - low)
    if code.dtype.is_signed:
        return codes.copysign(values), scales
    return codes.maximum((fractions > 0).to(codes.dtype)), scales


def check_blocks(blocks: Tensor) -> None:
    """Tell a compiler that rows ``(R, BLOCK)`` have that length: those of unknown length need memory for the results.

    Args:
        blocks: codes, or what has their shape.
    """
    torch._check(blocks.shape[-1] == BLOCK)  # type: ignore[no-untyped-call]


def over_blocks(function: Elementwise, blocks: Sequence[Tensor], *numbers: Tensor, **options: Any) -> None:
    """Call a function on blocks, in parts where it is not compiled, since it has temporary tensors there.

    Args:
        function: of blocks.
        blocks: tensors ``(R, BLOCK)``, the first of them, or ``(R,)``.
        numbers: of the function.
        options: of the function.
    """
    first = blocks[0]
    if first.is_meta or compiler.is_compiled(first.device):
        function(*blocks, *numbers, **options)
        return
    for parts in zip(*(torch.split(tensor, rows_per_chunk(first, BLOCK)) for tensor in blocks), strict=True):
        function(*parts, *numbers, **options)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of codes: ``(..., ceil(n / BLOCK))`` for ``(..., n)``."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def _in_blocks(rows: Tensor) -> Tensor:
    """View ``(..., n)`` as ``(..., blocks, width)``, padded with zeros if the last block is not full."""
    width = min(BLOCK, rows.shape[-1])
    padded = F.pad(rows, (0, -rows.shape[-1] % width)) if rows.shape[-1] % width else rows
    return padded.reshape(*padded.shape[:-1], -1, width)
