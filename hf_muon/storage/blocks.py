"""Equally spaced blocks of indices along one dim: the pattern in which a view cuts a weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
