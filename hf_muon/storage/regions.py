"""Which part of a whole tensor each rank of a group stores, as index arithmetic; nothing is sent here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from hf_muon.storage.views import Blocks, Cut, View

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
class StoredBox:
    """Some rows and columns of some matrices of a stack, and where a rank finds them in what it stores.

    Attributes:
        local: matrices of the stored stack, or elements of a stored slice; None for all that is stored.
        stored: their shape there.
        first, count: which of the matrices, counted from the first one that was asked for.
        rows: indices of the rows in each whole matrix.
        columns: indices of the columns.
        cut: what of `local` it is; None for all.
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
        return self.count, length(self.rows), length(self.columns)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Stored(Protocol):
    """What one rank stores of a matrix ``(m, n)`` or of a stack ``(B, m, n)``; equal where ranks store the same."""

    @property
    def numel(self) -> int: ...

    def parts(self, start: int, stop: int) -> Iterator[StoredBox]:
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

    def parts(self, start: int, stop: int) -> Iterator[StoredBox]:
        """See `Stored`."""
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
    """What one rank stores of a tensor of which all dims but the first make the columns of one matrix.

    Attributes:
        region: what it stores of the tensor.
        sizes: of those dims.
    """

    region: Region
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.region.numel

    def parts(self, start: int, stop: int) -> Iterator[StoredBox]:
        """See `Stored`."""
        rows, *others = self.region.dims
        columns: Ranges = ((0, 1),)
        for ranges, size in zip(others, self.sizes, strict=True):
            columns = _joined(
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

    def parts(self, start: int, stop: int) -> Iterator[StoredBox]:
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
            yield StoredBox(local, (size,), matrix - start, count, ((row, row + rows),), ((column, column + columns),))
            at += size


@dataclass(frozen=True)
class CutRegion:
    """What one rank stores of one of the parts into which a matrix, or each of a stack, is cut.

    Attributes:
        stored: what it stores of the whole matrices.
        axis: the dim that is cut, -2 for rows and -1 for columns.
        blocks: where the part lies along it.
        matrices: number of matrices.
    """

    stored: Stored
    axis: int
    blocks: Blocks
    matrices: int

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts(0, self.matrices))

    def parts(self, start: int, stop: int) -> Iterator[StoredBox]:
        """See `Stored`: of each part of the whole matrices what lies in the blocks."""
        for part in self.stored.parts(start, stop):
            # A slice of elements is seen as the matrices that it is first; a folded tensor is cut along its first dim.
            shape = part.shape if isinstance(part.local, slice) and len(part.stored) == 1 else None
            folded = isinstance(self.stored, FoldedRegion)
            dim = 0 if folded else len(shape or part.stored) + self.axis
            for blocks, own in self.blocks.within(part.rows if self.axis == -2 else part.columns):
                cut = Cut(blocks, dim, shape)
                rows, columns = ((own,), part.columns) if self.axis == -2 else (part.rows, (own,))
                yield StoredBox(part.local, cut.shape_of(part.stored), part.first, part.count, rows, columns, cut)


@lru_cache(maxsize=4096)
def seen_as(view: View, shape: tuple[int, ...], regions: tuple[Stored, ...]) -> tuple[tuple[Stored, ...], ...]:
    """For each matrix that a tensor is seen as, what each rank stores of it.

    Args:
        view: how it is seen.
        shape: of the whole tensor.
        regions: what each rank stores of it; of elements in a flat slice, those of matrices of the folded shape.
    """
    if view.flat:
        regions = tuple(FoldedRegion(r, tuple(shape[1:])) if isinstance(r, Region) else r for r in regions)
    if not view.parts:
        return (regions,)
    matrices = math.prod(view.folded(shape)[:-2])
    return tuple(tuple(CutRegion(r, view.axis, blocks, matrices) for r in regions) for blocks in view.parts)


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
