"""Which part of a whole tensor each rank of a group stores, as index arithmetic; nothing is sent here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of indices along one tensor dim, in the order in which they are stored."""


def length(ranges: Ranges) -> int:
    """Number of indices."""
    return sum(stop - start for start, stop in ranges)


def cut(ranges: Ranges, first: int, last: int) -> Ranges:
    """The indices stored at positions `first` to `last`."""
    kept = []
    position = 0
    for start, stop in ranges:
        lower, upper = max(first - position, 0), min(last - position, stop - start)
        if lower < upper:
            kept.append((start + lower, start + upper))
        position += stop - start
    return _joined(kept)


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def chunk(ranges: Ranges, parts: int, which: int) -> Ranges:
    """One of the parts that `torch.chunk` makes; empty where there are fewer indices than parts."""
    size = -(-length(ranges) // parts)
    return cut(ranges, which * size, (which + 1) * size)


@dataclass(frozen=True)
class Part:
    """Some rows and columns of some matrices of a stack, and where a rank finds them in what it stores.

    Attributes:
        local: matrices of the stored stack, or elements of a stored slice; None for all that is stored.
        stored: their shape there.
        first, count: which of the matrices, counted from the first one that was asked for.
        rows: indices of the rows in each whole matrix.
        columns: indices of the columns.
    """

    local: slice | None
    stored: tuple[int, ...]
    first: int
    count: int
    rows: Ranges
    columns: Ranges

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, length(self.rows), length(self.columns)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Stored(Protocol):
    """What one rank stores of a matrix ``(m, n)`` or of a stack ``(B, m, n)``; equal where ranks store the same."""

    @property
    def numel(self) -> int: ...

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """What is stored of the matrices `start` to `stop`."""
        ...


@dataclass(frozen=True)
class Region:
    """What one rank stores of a tensor: indices along each dim."""

    dims: tuple[Ranges, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length(ranges) for ranges in self.dims)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """See `Stored`."""
        rows, columns = self.dims[-2:]
        if len(self.dims) == 2:
            yield Part(None, self.shape, 0, 1, rows, columns)
            return
        position = 0
        for first, last in self.dims[0]:
            lower, upper = max(first, start), min(last, stop)
            if lower < upper:
                local = slice(position + lower - first, position + upper - first)
                count = upper - lower
                yield Part(local, (count, *self.shape[1:]), lower - start, count, rows, columns)
            position += last - first


@dataclass(frozen=True)
class FlatRegion:
    """What one rank stores of a matrix, or of a stack of them, as a slice of its elements in row-major order.

    Attributes:
        matrix: shape ``(m, n)`` of each matrix.
        start, stop: the elements.
    """

    matrix: tuple[int, int]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """See `Stored`: the end of a row, whole rows, whole matrices, whole rows, the beginning of a row."""
        m, n = self.matrix
        at, end = max(self.start, start * m * n), min(self.stop, stop * m * n)
        while at < end:
            matrix, row, column = at // (m * n), at // n % m, at % n
            left = end - at
            count, rows, columns = 1, 1, min(n - column, left)
            if column == 0 and left >= n:
                rows = min(m - row, left // n)
                if row == 0 and left >= m * n:
                    count, rows = left // (m * n), m
            size = count * rows * columns
            local = slice(at - self.start, at - self.start + size)
            yield Part(local, (size,), matrix - start, count, ((row, row + rows),), ((column, column + columns),))
            at += size


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region(tuple(((0, size),) if size else () for size in shape))


def regions(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any]) -> list[Region]:
    """The region of each mesh coordinate, in row-major order.

    Args:
        shape: of the whole tensor.
        mesh_shape: of the device mesh.
        placements: a `Shard`, `_StridedShard` or `Replicate` for each mesh axis, as torch applies them: from left to
            right, each to what the ones before it have left. A strided shard cuts into `split_factor` blocks first
            and takes its part of each, which leaves room for the contiguous cut of a later axis.
    """
    found = []
    for coordinate in itertools.product(*(range(size) for size in mesh_shape)):
        dims = list(whole(shape).dims)
        for axis, (placement, which) in enumerate(zip(placements, coordinate, strict=True)):
            if placement.is_replicate():
                continue
            dim, parts = placement.dim, mesh_shape[axis]
            blocks = getattr(placement, "split_factor", 1)
            taken = [chunk(chunk(dims[dim], blocks, block), parts, which) for block in range(blocks)]
            dims[dim] = _joined([piece for ranges in taken for piece in ranges])
        found.append(Region(tuple(dims)))
    return found
