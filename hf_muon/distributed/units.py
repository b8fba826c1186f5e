"""Choose which matrices are orthogonalized together, and by which rank, identically on all ranks."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_muon.math.cost import flops, form, working_bytes
from hf_muon.math.elementwise import is_accelerator, most_elements
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.storage.boxes import Box, Shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# On a CPU: a product of this many elements fills the hardware by itself, and batching gains nothing. Matrices of one
# shape make at least this many units, so that ranks can share them.
_BATCH_ELEMENTS = 2**22
_UNITS_OF_A_SHAPE = 8
# On accelerators: products are computed in tiles of 128 x 128, one by each of up to 200 processors at a time, so 2,048
# tiles keep all of them busy ten times over, and the last, partly empty turn costs at most a tenth. The matrices of a
# param group make at least about six units, so that ranks can share them.
_TILE = 128
_TILES = 2048
_UNITS_OF_ALL = 6
# Stacks are cut at common indices, into at most this many ranges, for at most this many times as many units.
_MOST_COLUMNS = 64
_MORE_UNITS = 1.2


class Matrix(NamedTuple):
    """A matrix ``(m, n)`` or a stack ``(B, m, n)`` of a param group.

    Attributes:
        param: the position in the group of the parameter, or flat partition, that stores it.
        shape: the whole shape, as it is stored.
        shards: what each rank of `group` stores of it.
        group: the ranks that store it; None for this process only.
        device: where it is orthogonalized.
        dtype: the dtype of its updates.
        transposed: whether it is stored as ``(in, out)``.
        elements: the slice of a flat partition that stores the matrix's parameter; None outside of partitions.
        name: the name of its parameter in a flat partition.
        factor: the factor of the learning rate.
    """

    param: int
    shape: tuple[int, ...]
    shards: Shards
    group: ProcessGroup | None = None
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    transposed: bool = False
    elements: slice | None = None
    name: str = ""
    factor: float = 1.0

    @property
    def out_in(self) -> tuple[int, int]:
        """Fan-out and fan-in."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def size(self) -> int:
        """Number of matrices."""
        return math.prod(self.shape[:-2])

    @property
    def exchange(self) -> tuple[ProcessGroup | None, torch.device, torch.dtype]:
        """A key that is equal for the matrices of one exchange: ranks, device and dtype."""
        return self.group, self.device, self.dtype

    def of(self, local: Tensor) -> Tensor:
        """Return the slice of a flat partition that stores the matrix's parameter; outside of partitions, `local`."""
        return local if self.elements is None else local[self.elements]


class Piece(NamedTuple):
    """The elements of a matrix that this rank steps at once.

    Attributes:
        matrix: position of the matrix, or stack, among those of its param group.
        box: some of what this rank stores of it.
    """

    matrix: int
    box: Box

    def of(self, local: Tensor) -> Tensor:
        """Return a view of the piece in a tensor that is stored like the matrix."""
        return self.box.of(local)


class MatrixRange(NamedTuple):
    """Matrices `start` to `stop` of the stack at position `matrix`, and its shards; a single matrix is 0 to 1."""

    matrix: int
    start: int
    stop: int
    shards: Shards


@dataclass(frozen=True)
class Unit:
    """A batch: matrices of one shape ``(m, n)`` that their owner orthogonalizes in one call.

    Which matrices form a unit never depends on the number of ranks or on how they store the matrices. Batched products
    round differently for different batches, so this is a condition for bit-identical results in every layout.

    Attributes:
        shape: the shape of each matrix.
        ranges: the matrices.
        owner: the rank that orthogonalizes them.
    """

    shape: tuple[int, int]
    ranges: tuple[MatrixRange, ...]
    owner: int = 0

    @property
    def count(self) -> int:
        """Number of matrices."""
        return sum(each.stop - each.start for each in self.ranges)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.count * math.prod(self.shape)

    @property
    def cost(self) -> int:
        """FLOPs of five Newton-Schulz steps in the Gram form, by which units are compared, whatever steps they take."""
        return self.count * _cost(self.shape)

    def only(self, active: Collection[int]) -> Unit:
        """Return the unit without the matrices that are not stepped."""
        stepped = tuple(each for each in self.ranges if each.matrix in active)
        return self if len(stepped) == len(self.ranges) else replace(self, ranges=stepped)

    @cached_property
    def stored(self) -> list[int]:
        """Elements that each rank stores."""
        return self._total(Shards.stored)

    @cached_property
    def holders(self) -> list[int]:
        """The ranks that store all of the unit."""
        numel = self.numel
        return [rank for rank, stored in enumerate(self.stored) if stored == numel]

    @property
    def is_everywhere(self) -> bool:
        """Whether all ranks store all of the unit."""
        return min(self.stored) == self.numel

    def sent(self) -> list[int]:
        """Return the elements that each rank sends to the owner, including the owner's own."""
        return self._total(lambda shards, start, stop: shards.sent_to(self.owner, start, stop))

    def _total(self, of_ranks: Callable[[Shards, int, int], tuple[int, ...]]) -> list[int]:
        """Return the sum over all ranges of numbers of each rank; most ranges are stored alike."""
        alike = Counter((each.shards, each.start, each.stop) for each in self.ranges)
        numbers = [[times * number for number in of_ranks(*stored)] for stored, times in alike.items()]
        return numbers[0] if len(numbers) == 1 else list(map(sum, zip(*numbers, strict=True)))

    def boxes(self, rank: int) -> Iterator[tuple[Piece, Box, bool]]:
        """Yield what a rank stores of the unit, in the order in which it stores it.

        Yields:
            The piece in storage, its box of the unit's batch, and whether this rank sends it to the owner.
        """
        position = 0
        for matrix, start, stop, shards in self.ranges:
            sends = shards.sends(rank, self.owner)
            for box in shards.held[rank].boxes(start, stop):
                yield Piece(matrix, box), box._replace(first=position + box.first), sends
            position += stop - start


def make_units(matrices: Sequence[Matrix], max_batch_bytes: int = MAX_BATCH_BYTES) -> list[Unit]:
    """Group matrices of one shape into units of about equally many, which are small enough for ranks to share them.

    Stacks of experts are cut along their first dim at common indices, so that ranks that store whole experts of every
    stack keep their units.

    Args:
        matrices: all of a param group.
        max_batch_bytes: bound on the memory of a unit on an accelerator, as long as it has two matrices.
    """
    alike: dict[tuple[tuple[int, int], bool, Hashable], list[int]] = {}
    # Over all exchanges: who stores a matrix must not change its batch.
    counts: Counter[tuple[tuple[int, int], bool]] = Counter()
    total = 0
    for i, matrix in enumerate(matrices):
        if math.prod(matrix.shape):
            rows, columns = matrix.shape[-2:]
            # Rules compute by rows of the weight, so matrices that are stored transposed are in separate batches.
            alike.setdefault(((rows, columns), matrix.transposed, matrix.exchange), []).append(i)
            counts[(rows, columns), matrix.transposed] += matrix.size
            total += matrix.size * _cost((rows, columns))
    units: list[Unit] = []
    for (shape, transposed, _), members in alike.items():
        stacks = {i: matrices[i].size for i in members}
        if is_accelerator(matrices[members[0]].device):
            size = _size_on_accelerator(shape, max_batch_bytes, total / _UNITS_OF_ALL)
        else:
            size = max(1, min(_BATCH_ELEMENTS // math.prod(shape), counts[shape, transposed] // _UNITS_OF_A_SHAPE))
        columns = _columns([*stacks.values()], size)
        for column in range(columns):
            cut = {i: (stack * column // columns, stack * (column + 1) // columns) for i, stack in stacks.items()}
            units += [
                Unit(shape, tuple(MatrixRange(i, start, stop, matrices[i].shards) for i, start, stop in ranges))
                for ranges in _even(cut, size)
            ]
    return units


def _cost(shape: tuple[int, int]) -> int:
    # In one dtype and number of steps, whatever the run's: units do not depend on options of a step.
    return flops(shape, form(shape, 5, torch.float16))


def _size_on_accelerator(shape: tuple[int, int], max_batch_bytes: int, most_cost: float) -> int:
    """Return how many matrices fill an accelerator several times over.

    They have about `_TILES` tiles of output in their smallest product, unless their memory or their cost would be too
    large.
    """
    tiles = math.ceil(min(shape) / _TILE) ** 2
    nbytes = working_bytes(shape, form(shape, 5, torch.float16), torch.float16)
    fits = min(max_batch_bytes // nbytes, most_elements(max_batch_bytes) // math.prod(shape))
    return max(1, min(_TILES // tiles, fits, math.ceil(most_cost / _cost(shape))))


def _columns(stacks: Sequence[int], size: int) -> int:
    """Return into how many ranges of indices to cut all stacks: as many as cost at most a fifth more units."""
    whole, columns = sum(stacks), 1
    while columns < _MOST_COLUMNS and all(stack % (2 * columns) == 0 for stack in stacks):
        units = 2 * columns * math.ceil(whole / (2 * columns) / size)
        if units > _MORE_UNITS * math.ceil(whole / size):
            break
        columns *= 2
    return columns


def _even(ranges: Mapping[int, tuple[int, int]], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield parts of at most `size` matrices, about equally large, in the order of the matrices' indices.

    Args:
        ranges: the first index of each stack and the one after the last, by the stack's position.
        size: matrices in a part.

    Yields:
        Positions of stacks, each with the first index and the one after the last.
    """
    # By index first: ranks that store whole experts then have the same indices of every stack in one unit.
    order = sorted((k, i) for i, (start, stop) in ranges.items() for k in range(start, stop))
    count = math.ceil(len(order) / size)
    for u in range(count):
        merged: list[tuple[int, int, int]] = []
        for i, k in sorted((i, k) for k, i in order[len(order) * u // count : len(order) * (u + 1) // count]):
            if merged and merged[-1][0] == i and merged[-1][2] == k:
                merged[-1] = (i, merged[-1][1], k + 1)
            else:
                merged.append((i, k, k + 1))
        yield merged


def assign_owners(units: Sequence[Unit], ranks: int, holders: Sequence[Collection[int]] = ()) -> list[int]:
    """Return an owner for each unit, so that all ranks have about the same work.

    A unit that some ranks store whole need not travel: the one of them with the least work owns it, unless that would
    give it more than its share. All others go, longest first, to the rank with the least work.

    Args:
        units: in the same order on all ranks.
        ranks: number of ranks.
        holders: for each unit, the ranks that store all of it; empty to ignore this.

    Source: Graham, Bounds on multiprocessing timing anomalies (1969), for the longest-first rule.
    """
    order = sorted(range(len(units)), key=lambda u: (-units[u].cost, units[u].shape, u))
    owners = [-1] * len(units)
    load = [0] * ranks
    share = max(sum(unit.cost for unit in units) / ranks, units[order[0]].cost) if units else 0.0
    for u in order if holders else ():
        if 0 < len(holders[u]) < ranks:
            rank = min(holders[u], key=lambda r: (load[r], r))
            if load[rank] + units[u].cost <= share:
                owners[u] = rank
                load[rank] += units[u].cost
    idle = [(work, rank) for rank, work in enumerate(load)]
    heapq.heapify(idle)
    for u in order:
        if owners[u] < 0:
            work, rank = idle[0]
            owners[u] = rank
            heapq.heapreplace(idle, (work + units[u].cost, rank))
    return owners
