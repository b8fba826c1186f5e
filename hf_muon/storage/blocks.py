"""Equally spaced blocks of indices along one dim: the pattern in which a view cuts a weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` indices along a dim.

    Attributes:
        start: the first index.
        size: indices of a block.
        count: number of blocks.
        stride: from the start of a block to the start of the next one.
    """

    start: int
    size: int
    count: int = 1
    stride: int = 0

    @property
    def length(self) -> int:
        """Number of indices."""
        return self.size * self.count

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Return a view of these indices of a tensor; several blocks replace `dim` by two dims, ``(count, size)``."""
        if self.count == 1:
            return tensor.narrow(dim, self.start, self.size)
        span = tensor.narrow(dim, self.start, (self.count - 1) * self.stride + self.size)
        return span.unfold(dim, self.size, self.stride).movedim(-1, dim + 1)

    def shape(self) -> tuple[int, ...]:
        """Return the dims that `of` puts in place of `dim`."""
        return (self.size,) if self.count == 1 else (self.count, self.size)

    def within(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[Blocks, tuple[int, int]]]:
        """Intersect these blocks with the indices that a rank stores.

        Args:
            ranges: half-open ranges of the stored indices, in the order in which they are stored.

        Yields:
            Blocks of positions in what the rank stores, and the range of indices that they are, counted along these
            blocks from 0.
        """
        position = 0
        for first, last in ranges:
            yield from self._within(first, last, position - first)
            position += last - first

    def _within(self, first: int, last: int, shift: int) -> Iterator[tuple[Blocks, tuple[int, int]]]:
        stride = self.stride or self.size
        block = max(0, (first - self.start) // stride)
        while block < self.count and self.start + block * stride < last:
            begin = self.start + block * stride
            lower, upper = max(begin, first), min(begin + self.size, last)
            whole = (last - begin - self.size) // stride + 1 if lower == begin else 0
            if whole > 1:
                count = min(whole, self.count - block)
                own = (block * self.size, (block + count) * self.size)
                yield Blocks(begin + shift, self.size, count, stride if count > 1 else 0), own
                block += count
                continue
            if lower < upper:
                own = (block * self.size + lower - begin, block * self.size + upper - begin)
                yield Blocks(lower + shift, upper - lower), own
            block += 1


@dataclass(frozen=True)
class Cut:
    """Blocks along one dim of a stored tensor.

    Attributes:
        blocks: the indices.
        dim: along which they lie.
        shape: to which a flat stored tensor is reshaped first; None for its own.
    """

    blocks: Blocks
    dim: int
    shape: tuple[int, ...] | None = None

    def of(self, stored: Tensor) -> Tensor:
        """Return a view of these indices of a stored tensor."""
        return self.blocks.of(stored if self.shape is None else stored.view(self.shape), self.dim)

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of that view."""
        shape = self.shape or stored
        return (*shape[: self.dim], *self.blocks.shape(), *shape[self.dim + 1 :])
