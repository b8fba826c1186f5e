"""Map what a rank stores to the matrices that it belongs to: boxes.

A *box* is a range of rows and columns of consecutive matrices, and a strided view of a stored tensor. With any sharding
and any view, a rank's part of a tensor consists of boxes. Only boxes are moved, copied or sent.

All types of the geometry (docs/design.md has their words), for a weight (4, 6) that is read as two matrices (4, 3):

>>> from hf_muon.storage.views import parse
>>> view = parse("columns 3+3")
>>> view.shapes((4, 6))
[(4, 3), (4, 3)]

FSDP2 stores two rows on each of two ranks. A `Region` is the ranges of indices that a rank stores along each dim,
`SharedStorage` those of all ranks, `Shards` one of the two matrices on all ranks, and `Held` that matrix on one rank:

>>> regions = tuple(Region((rows, ((0, 6),))) for rows in (((0, 2),), ((2, 4),)))
>>> first, second = SharedStorage(None, (4, 6), regions).shards(view)
>>> second.held[1].region.shape, second.held[1].blocks  # of the local tensor (2, 6), columns 3 to 6
((2, 6), Blocks(start=3, size=3, count=1, stride=0))

A `Box` says where rank 1 finds its part of the second matrix, and which part of the matrix that is:

>>> (box,) = second.held[1].boxes(0, 1)
>>> (box.starts, box.stored), (box.rows, box.columns)
(((0, 3), (2, 3)), (((2, 4),), ((0, 3),)))

ZeRO stores slices of a flat tensor in place of the weight. Here each rank's part has 14 elements. A `Division` says
which of these are the weight's, a `Slice` where a rank has its share, and a `Partition` is one rank's part with all of
its slices. A share is a `FlatRegion`, whose boxes may begin and end within a row:

>>> from hf_muon.storage.partitions import Division, Slice
>>> weight = Slice((4, 6), Division(numel=24, size=14), ranks=2, view=view)
>>> weight.elements(0), weight.elements(1)
(slice(0, 14, None), slice(0, 10, None))
>>> held = weight.shards()[0].held[0]  # of the first matrix, two rows and the beginning of the third
>>> held.region, [box.stored for box in held.boxes(0, 1)]
(FlatRegion(matrix=(4, 6), start=0, stop=14), [(1, 2, 3), (1, 1, 2)])

A `Unit` is a batch: matrices of one shape, each a `MatrixRange` of a stack. A `Piece` is a box of the matrix at some
position, which a rank steps at once:

>>> from hf_muon.distributed.units import MatrixRange, Unit
>>> unit = Unit((4, 3), (MatrixRange(0, 0, 1, first), MatrixRange(1, 0, 1, second)), owner=0)
>>> for piece, in_batch, sends in unit.boxes(rank=1):  # with its box in the batch (2, 4, 3)
...     piece.matrix, piece.box.starts, in_batch.first, sends
(0, (0, 0), 0, True)
(1, (0, 3), 1, True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hf_muon.storage.regions import FlatRegion, Ranges, Region, length, merge, whole
from hf_muon.storage.views import Blocks, View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Dim(NamedTuple):
    """A dim of a box: `size` indices of the stored dim `of`, each `step` after the one before it."""

    size: int
    of: int
    step: int = 1


class Box(NamedTuple):
    """Some rows and columns of consecutive matrices, and where a rank finds them in what it stores.

    The strides of its dims are those of the stored tensor at hand: a parameter, its gradient and its moments may lie in
    memory in different orders.

    Attributes:
        starts: the first index along each stored dim.
        dims: the dims of the box in storage: of matrices, if they are a stack, of rows and of columns.
        first: the first of the matrices, counted in a stack or in a batch ``(B, m, n)``.
        shape: number of matrices, rows and columns: the shape in which the box travels.
        rows: indices of its rows in each whole matrix.
        columns: indices of its columns in each whole matrix.
        is_all: whether it is all that is stored.
        has_whole_rows: whether it has all indices of the last stored dim, however many a tensor has there: moments in 8
            bits have a scale for each block of them.
    """

    starts: tuple[int, ...]
    dims: tuple[Dim, ...]
    first: int
    shape: tuple[int, int, int]
    rows: Ranges
    columns: Ranges
    is_all: bool = False
    has_whole_rows: bool = True

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in storage."""
        return tuple(dim.size for dim in self.dims)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count, rows, columns = self.shape
        return count * rows * columns

    def of(self, stored: Tensor) -> Tensor:
        """Return a view of the box in a stored tensor."""
        if self.is_all:
            return stored
        sizes = list(self.stored)
        if self.has_whole_rows:
            sizes[-1] = stored.shape[-1]
        return self._view(stored, self.dims, sizes, self.starts)

    def rows_of(self, stored: Tensor) -> Tensor:
        """Return a view of whole rows of a stored tensor, those that the box has a part of."""
        last = stored.ndim - 1
        dims = (*(dim for dim in self.dims if dim.of != last), Dim(stored.shape[-1], last))
        return self._view(stored, dims, [dim.size for dim in dims], (*self.starts[:-1], 0))

    def columns_of(self, rows: Tensor) -> Tensor:
        """Return a view of the box in its whole rows, a tensor of the shape that `rows_of` returns."""
        *steps, step = rows.stride()
        dims = [dim for dim in self.dims if dim.of == len(self.starts) - 1]
        sizes = [*rows.shape[:-1], *(dim.size for dim in dims)]
        first = int(rows.storage_offset()) + self.starts[-1] * step
        return rows.as_strided(sizes, [*steps, *(dim.step * step for dim in dims)], first)

    @staticmethod
    def _view(stored: Tensor, dims: Sequence[Dim], sizes: Sequence[int], starts: Sequence[int]) -> Tensor:
        # Not by slices: blocks make two dims of one.
        strides = stored.stride()
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        steps = [dim.step * strides[dim.of] for dim in dims]
        return stored.as_strided(sizes, steps, int(stored.storage_offset()) + first)

    def joined(self, following: Box) -> Box | None:
        """Return this box and the one that follows it in memory as one of a batch; where it lies in storage is lost.

        None unless both are the same rows and columns of matrices that follow one another in the batch.
        """
        count, *sides = self.shape
        sides_are_equal = (self.rows, self.columns) == (following.rows, following.columns)
        if self.first + count != following.first or not sides_are_equal:
            return None
        return self._replace(shape=(count + following.shape[0], sides[0], sides[1]))

    def in_batch(self, batch: Tensor) -> Tensor:
        """Return the box of a batch ``(B, m, n)`` as a flat tensor, a view where it has whole matrices."""
        matrices = batch[self.first : self.first + self.shape[0]]
        if matrices.shape == self.shape:
            return matrices.reshape(-1)
        data = batch.new_empty(self.shape)
        self.read(batch, data)
        return data.view(-1)

    def read(self, batch: Tensor, data: Tensor) -> None:
        """Copy the box out of a batch, into data of its `shape`."""
        for part, place in self._slices():
            data[part] = batch[place]

    def write(self, data: Tensor, batch: Tensor) -> None:
        """Copy data of the box's `shape` into a batch."""
        for part, place in self._slices():
            batch[place] = data[part]

    def _slices(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield parts of the data, and of the batch."""
        matrices = slice(self.first, self.first + self.shape[0])
        row = 0
        for top, bottom in self.rows:
            column = 0
            for left, right in self.columns:
                target = slice(row, row + bottom - top), slice(column, column + right - left)
                yield (slice(None), *target), (matrices, slice(top, bottom), slice(left, right))
                column += right - left
            row += bottom - top


@dataclass(frozen=True)
class Held:
    """The part of a tensor's matrices that one rank stores, for one part of a view.

    Two of them that are equal hold the same elements.

    Attributes:
        region: what the rank stores of the tensor.
        folded: sizes of the dims that make the columns, if the view is flat and the region has such dims.
        axis: the dim of each matrix that the view cuts, -2 for rows and -1 for columns; 0 where it cuts none.
        blocks: the rows or columns of this part; None where the view cuts none.
    """

    region: Region | FlatRegion
    folded: tuple[int, ...] = ()
    axis: int = 0
    blocks: Blocks | None = None
    _boxes: dict[tuple[int, int], tuple[Box, ...]] = field(default_factory=dict, compare=False, repr=False)

    def boxes(self, start: int, stop: int) -> tuple[Box, ...]:
        """Return what the rank stores of the matrices `start` to `stop`; the first of these is 0 in its boxes."""
        if (start, stop) not in self._boxes:
            uncut = self._uncut(start, stop)
            part = self.blocks
            cut = uncut if part is None else (cut_box for box in uncut for cut_box in self._cut(box, part))
            self._boxes[start, stop] = tuple(box for box in cut if box.numel)
        return self._boxes[start, stop]

    def _uncut(self, start: int, stop: int) -> Iterator[Box]:
        if isinstance(self.region, FlatRegion):
            yield from _boxes_of_slice(self.region, start, stop)
            return
        shape = self.region.shape
        rows, *inner = self.region.dims if self.folded else self.region.dims[-2:]
        dims = tuple(Dim(size, d) for d, size in enumerate(shape))
        if self.folded or len(shape) == 2:
            columns = _folded(inner, self.folded) if self.folded else inner[0]
            yield Box((0,) * len(shape), dims, 0, (1, length(rows), length(columns)), rows, columns, is_all=True)
            return
        position = 0
        for first, last in self.region.dims[0]:
            lower, upper = max(first, start), min(last, stop)
            if lower < upper:
                starts, size = (position + lower - first, 0, 0), (upper - lower, shape[1], shape[2])
                stack = (Dim(size[0], 0), *dims[1:])
                yield Box(starts, stack, lower - start, size, rows, inner[0], is_all=size == shape)
            position += last - first

    def _cut(self, box: Box, part: Blocks) -> Iterator[Box]:
        """Yield the intersection of a box of whole matrices with the part."""
        # A folded tensor is cut along dim 0, whose indices are the rows: `views` allows no other cut of it.
        at = 0 if self.folded else len(box.dims) + self.axis
        _, of, step = box.dims[at]
        for stored, indices in part.within(box.rows if self.axis == -2 else box.columns):
            blocks = (Dim(stored.count, of, stored.stride * step),) if stored.count > 1 else ()
            starts = (*box.starts[:of], box.starts[of] + stored.start * step, *box.starts[of + 1 :])
            rows, columns = ((indices,), box.columns) if self.axis == -2 else (box.rows, (indices,))
            yield box._replace(
                starts=starts,
                shape=(box.shape[0], length(rows), length(columns)),
                dims=(*box.dims[:at], *blocks, Dim(stored.size, of, step), *box.dims[at + 1 :]),
                rows=rows,
                columns=columns,
                is_all=False,
                has_whole_rows=box.has_whole_rows and self.axis == -2,
            )


def _boxes_of_slice(region: FlatRegion, start: int, stop: int) -> Iterator[Box]:
    """Yield at most five boxes: partial row, full rows, full matrices, full rows, partial row."""
    m, n = region.matrix
    at, end = max(region.start, start * m * n), min(region.stop, stop * m * n)
    while at < end:
        matrix, row, column = at // (m * n), at // n % m, at % n
        left = end - at
        count, rows, columns = 1, 1, min(n - column, left)
        if column == 0 and left >= n:
            rows = min(m - row, left // n)
            if row == 0 and left >= m * n:
                count, rows = left // (m * n), m
        dims = (Dim(count, 0, m * n), Dim(rows, 0, n), Dim(columns, 0))
        of_matrix = ((row, row + rows),), ((column, column + columns),)
        shape = (count, rows, columns)
        yield Box((at - region.start,), dims, matrix - start, shape, *of_matrix, has_whole_rows=False)
        at += count * rows * columns


def _folded(dims: Sequence[Ranges], sizes: Sequence[int]) -> Ranges:
    """Return the columns that dims of these sizes make."""
    columns: Ranges = ((0, 1),)
    for ranges, size in zip(dims, sizes, strict=True):
        columns = merge(
            [
                (outer * size + first, outer * size + last)
                for begin, end in columns
                for outer in range(begin, end)
                for first, last in ranges
            ]
        )
    return columns


class Shards:
    """Each rank's part of a tensor's matrices, for one part of a view.

    What any two ranks store is either equal or disjoint. Tensors that are stored alike share one object, so that what
    follows from it is computed once.

    Args:
        held: the part of each rank.

    Attributes:
        held: the part of each rank.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = held
        alike: dict[Held, list[int]] = {}
        for rank, part in enumerate(held):
            alike.setdefault(part, []).append(rank)
        # For each rank: its position among those that store the same, and their number.
        self._replicas = [(0, 0)] * len(held)
        for ranks in alike.values():
            for position, rank in enumerate(ranks):
                self._replicas[rank] = position, len(ranks)
        # Most of a thousand ranks hold nothing of a tensor.
        self._holders = [rank for rank, part in enumerate(held) if part.region.numel]
        # Numbers and no tensors, which would be those of a fake mode that has long ended.
        self._stored: dict[tuple[int, int], tuple[int, ...]] = {}

    def sends(self, rank: int, owner: int) -> bool:
        """Return whether a rank sends what it stores to an owner: of ranks that store the same, exactly one does.

        It is the owner itself if the owner stores the same, else the rank with the owner's position among its replicas.
        """
        # Equal positions make one replica of the tensor. The remainder is for parts that fewer ranks store than the
        # owner's.
        position, count = self._replicas[rank]
        return self._replicas[owner][0] % count == position

    def stored(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the elements of the matrices `start` to `stop` that each rank stores."""
        if (start, stop) not in self._stored:
            stored = [0] * len(self.held)
            for rank in self._holders:
                stored[rank] = sum(box.numel for box in self.held[rank].boxes(start, stop))
            self._stored[start, stop] = tuple(stored)
        return self._stored[start, stop]

    def sent_to(self, owner: int, start: int, stop: int) -> tuple[int, ...]:
        """Return the elements of the matrices `start` to `stop` that each rank sends to an owner, or keeps."""
        sent = [*self.stored(start, stop)]
        for rank in self._holders:
            sent[rank] *= self.sends(rank, owner)
        return tuple(sent)


@lru_cache(maxsize=4096)
def shards_of(view: View, shape: tuple[int, ...], regions: Sequence[Region | FlatRegion]) -> tuple[Shards, ...]:
    """Return, for each part of a view, what each rank stores of its matrices. A view that cuts nothing has one part.

    Args:
        view: the view of the tensor.
        shape: the shape of the whole tensor.
        regions: what each rank stores of the tensor, a tuple; if it stores a flat slice, of matrices of the folded
            shape.
    """
    folded = tuple(shape[1:]) if view.flat else ()
    parts: list[tuple[int, Blocks | None]] = [(view.axis, blocks) for blocks in view.parts] or [(0, None)]
    return tuple(
        Shards([Held(region, folded if isinstance(region, Region) else (), *part) for region in regions])
        for part in parts
    )


@dataclass(frozen=True, eq=False)
class SharedStorage:
    """How the ranks of a process group store a tensor.

    Attributes:
        group: the process group; None if only this process has the tensor.
        shape: the shape of the whole tensor.
        regions: what each rank stores, in the order of the group's ranks; empty for flat partitions.
    """

    group: ProcessGroup | None
    shape: tuple[int, ...]
    regions: tuple[Region, ...] = ()

    def shards(self, view: View) -> tuple[Shards, ...]:
        """Return, for each part of a view of the tensor, what each rank stores of it."""
        return shards_of(view, self.shape, self.regions)


def replicated(shape: tuple[int, ...], group: ProcessGroup | None) -> SharedStorage:
    """Return the storage of a tensor that each rank of a group has whole, or only this process."""
    return SharedStorage(group, shape, (whole(shape),) * (1 if group is None else group.size()))
