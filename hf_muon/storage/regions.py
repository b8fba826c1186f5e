"""Which elements of a whole tensor each rank of a group stores, as index arithmetic.

A *region* is what one rank stores of a matrix ``(m, n)`` or of a stack ``(B, m, n)``. Whatever its form, it consists of
*boxes*: some rows and columns of consecutive matrices. Only boxes are ever copied or sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from hf_muon.storage.blocks import Blocks, Cut
from hf_muon.storage.views import View

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of indices along one tensor dim, in the order in which they are stored."""


def length(ranges: Ranges) -> int:
    """Return the number of indices."""
    return sum(stop - start for start, stop in ranges)


def take(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return the indices that are stored at positions `first` to `last`."""
    pieces = []
    position = 0
    for start, stop in ranges:
        lower, upper = max(first - position, 0), min(last - position, stop - start)
        if lower < upper:
            pieces.append((start + lower, start + upper))
        position += stop - start
    return _merge(pieces)


def _merge(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Join ranges that follow one another without a gap."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def chunk(ranges: Ranges, chunks: int, index: int) -> Ranges:
    """Return the chunk number `index` that `torch.chunk` makes; empty if there are fewer indices than chunks."""
    size = -(-length(ranges) // chunks)
    return take(ranges, index * size, (index + 1) * size)


@dataclass(frozen=True)
class StoredBox:
    """Some rows and columns of consecutive matrices of a stack, and where a rank finds them in what it stores.

    Attributes:
        local: matrices of the stored stack, or elements of a stored slice; None for all that is stored.
        stored: the shape of the box in storage.
        first, count: of the matrices; 0 is the first one that `Stored.boxes` was asked for.
        rows: indices of the rows in each whole matrix.
        columns: indices of the columns in each whole matrix.
        cut: which rows or columns of `local` it consists of; None for all.
    """

    local: slice | None
    stored: tuple[int, ...]
    first: int
    count: int
    rows: Ranges
    columns: Ranges
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        return self.count, length(self.rows), length(self.columns)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Stored(Protocol):
    """What one rank stores of a matrix ``(m, n)`` or of a stack ``(B, m, n)``.

    Two of them are equal if and only if the ranks store the same elements.
    """

    @property
    def numel(self) -> int:
        """Number of elements."""
        ...

    def boxes(self, start: int, stop: int) -> Iterator[StoredBox]:
        """Yield what the rank stores of the matrices `start` to `stop`."""
        ...


@dataclass(frozen=True)
class Region:
    """What one rank stores of a tensor: indices along each dim."""

    dims: tuple[Ranges, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(length(ranges) for ranges in self.dims)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def boxes(self, start: int, stop: int) -> Iterator[StoredBox]:
        """Yield what the rank stores of the matrices `start` to `stop`; see `Stored`."""
        rows, columns = self.dims[-2:]
        if len(self.dims) == 2:
            yield StoredBox(None, self.shape, 0, 1, rows, columns)
            return
        position = 0
        for first, last in self.dims[0]:
            lower, upper = max(first, start), min(last, stop)
            if lower < upper:
                local = slice(position + lower - first, position + upper - first)
                count = upper - lower
                yield StoredBox(local, (count, *self.shape[1:]), lower - start, count, rows, columns)
            position += last - first


@dataclass(frozen=True)
class FoldedRegion:
    """What one rank stores of a tensor whose view is flat: all dims but the first make the columns of one matrix.

    Attributes:
        region: what it stores of the tensor.
        sizes: of the dims that make the columns.
    """

    region: Region
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.region.numel

    def boxes(self, start: int, stop: int) -> Iterator[StoredBox]:
        """Yield what the rank stores of the only matrix; see `Stored`."""
        rows, *others = self.region.dims
        columns: Ranges = ((0, 1),)
        for ranges, size in zip(others, self.sizes, strict=True):
            columns = _merge(
                [
                    (outer * size + first, outer * size + last)
                    for begin, end in columns
                    for outer in range(begin, end)
                    for first, last in ranges
                ]
            )
        yield StoredBox(None, self.region.shape, 0, 1, rows, columns)


@dataclass(frozen=True)
class FlatRegion:
    """What one rank stores of a matrix or stack: a slice of its elements in row-major order.

    Attributes:
        matrix: shape ``(m, n)`` of each matrix.
        start, stop: the elements.
    """

    matrix: tuple[int, int]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def boxes(self, start: int, stop: int) -> Iterator[StoredBox]:
        """Yield at most five boxes: partial row, full rows, full matrices, full rows, partial row; see `Stored`."""
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
            yield StoredBox(local, (size,), matrix - start, count, ((row, row + rows),), ((column, column + columns),))
            at += size


@dataclass(frozen=True)
class PartRegion:
    """What one rank stores of one part of a view, which cuts each whole matrix into parts.

    Attributes:
        stored: what it stores of the whole matrices.
        axis: the dim that is cut, -2 for rows and -1 for columns.
        blocks: the rows or columns of the part.
        matrices: number of whole matrices.
    """

    stored: Stored
    axis: int
    blocks: Blocks
    matrices: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(box.numel for box in self.boxes(0, self.matrices))

    def boxes(self, start: int, stop: int) -> Iterator[StoredBox]:
        """Yield the intersection of each box of the whole matrices with the part; see `Stored`."""
        for box in self.stored.boxes(start, stop):
            # Reshape a flat slice to matrices before cutting it. A folded tensor is always cut along dim 0.
            shape = box.shape if isinstance(box.local, slice) and len(box.stored) == 1 else None
            folded = isinstance(self.stored, FoldedRegion)
            dim = 0 if folded else len(shape or box.stored) + self.axis
            for blocks, own in self.blocks.within(box.rows if self.axis == -2 else box.columns):
                cut = Cut(blocks, dim, shape)
                rows, columns = ((own,), box.columns) if self.axis == -2 else (box.rows, (own,))
                yield StoredBox(box.local, cut.shape_of(box.stored), box.first, box.count, rows, columns, cut)


@lru_cache(maxsize=4096)
def part_regions(view: View, shape: tuple[int, ...], regions: tuple[Stored, ...]) -> tuple[tuple[Stored, ...], ...]:
    """Return, for each part of a view, what each rank stores of it. A view that cuts nothing has one part.

    Args:
        view: of the tensor.
        shape: of the whole tensor.
        regions: what each rank stores of the tensor; if it stores a flat slice, of matrices of the folded shape.
    """
    if view.flat:
        regions = tuple(FoldedRegion(r, tuple(shape[1:])) if isinstance(r, Region) else r for r in regions)
    if not view.parts:
        return (regions,)
    matrices = math.prod(view.folded(shape)[:-2])
    return tuple(tuple(PartRegion(r, view.axis, blocks, matrices) for r in regions) for blocks in view.parts)


def whole(shape: Sequence[int]) -> Region:
    """Return the region that is all of a tensor."""
    return Region(tuple(((0, size),) if size else () for size in shape))


def regions(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any]) -> list[Region]:
    """Return the region of each mesh coordinate, in row-major order.

    Args:
        shape: of the whole tensor.
        mesh_shape: of the device mesh.
        placements: a `Shard`, `_StridedShard` or `Replicate` for each mesh axis. As in torch, they apply from left to
            right, each to what the ones before it leave. A strided shard first splits the dim into `split_factor`
            chunks and then takes its share of each, so that a later axis can split contiguously.
    """
    of_mesh = []
    for coordinate in itertools.product(*(range(size) for size in mesh_shape)):
        dims = list(whole(shape).dims)
        for axis, (placement, index) in enumerate(zip(placements, coordinate, strict=True)):
            if placement.is_replicate():
                continue
            dim, chunks = placement.dim, mesh_shape[axis]
            factor = getattr(placement, "split_factor", 1)
            shares = [chunk(chunk(dims[dim], factor, k), chunks, index) for k in range(factor)]
            dims[dim] = _merge([piece for share in shares for piece in share])
        of_mesh.append(Region(tuple(dims)))
    return of_mesh
