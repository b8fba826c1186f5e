"""Which elements of a whole tensor each rank of a group stores, as index arithmetic: its *region* of the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of indices along one tensor dim, in the order in which they are stored."""


def length(ranges: Ranges) -> int:
    """Return the number of indices."""
    return sum(stop - start for start, stop in ranges)


def indices_at(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return the indices that are stored at positions `first` to `last`."""
    pieces = []
    position = 0
    for start, stop in ranges:
        lower, upper = max(first - position, 0), min(last - position, stop - start)
        if lower < upper:
            pieces.append((start + lower, start + upper))
        position += stop - start
    return merge(pieces)


def merge(ranges: Sequence[tuple[int, int]]) -> Ranges:
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
    return indices_at(ranges, index * size, (index + 1) * size)


@dataclass(frozen=True)
class Region:
    """A rank's part of a tensor: indices along each dim."""

    dims: tuple[Ranges, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(length(ranges) for ranges in self.dims)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatRegion:
    """A rank's part of a matrix or stack: a slice of its elements in row-major order.

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


def whole(shape: Sequence[int]) -> Region:
    """Return the region that is all of a tensor."""
    return Region(tuple(((0, size),) if size else () for size in shape))


def regions(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any]) -> list[Region]:
    """Return the region of each mesh coordinate, in row-major order.

    Args:
        shape: the shape of the whole tensor.
        mesh_shape: the shape of the device mesh.
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
            dims[dim] = merge([piece for share in shares for piece in share])
        of_mesh.append(Region(tuple(dims)))
    return of_mesh
