"""Which matrices are orthogonalized together, and by which rank; all ranks compute the same without communication."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_muon.math.cost import BlockRows, flops, segments, working_bytes
from hf_muon.math.elementwise import most_elements
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES

# A product of this many elements fills the hardware by itself, and batching gains nothing.
_BATCH_ELEMENTS = 2**22
# Matrices of one shape make at least this many units, so that ranks can share them.
_UNITS_OF_A_SHAPE = 8
# On accelerators: products are computed in tiles of 128 x 128, one by each of up to 200 processors at a time.
_TILE = 128
_TILES = 2048
# A group of matrices makes at least about this many units, so that ranks can share them.
_UNITS_OF_ALL = 6
# Stacks are cut at common indices, into at most this many ranges, for at most this many times as many units.
_MOST_COLUMNS = 64
_MORE_UNITS = 1.2


class MatrixRange(NamedTuple):
    """Matrices `start` to `stop` of the stack at position `matrix`; a single matrix is 0 to 1."""

    matrix: int
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """A batch: matrices of one shape ``(m, n)`` that their owner orthogonalizes in one call.

    Which matrices form a unit never depends on the number of ranks or on how they store the matrices. Batched products
    round differently for different batches, so this is a condition for bit-identical results in every layout.
    """

    shape: tuple[int, int]
    ranges: tuple[MatrixRange, ...]

    @property
    def count(self) -> int:
        """Number of matrices."""
        return sum(matrices.stop - matrices.start for matrices in self.ranges)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.count * math.prod(self.shape)

    @property
    def cost(self) -> int:
        """FLOPs of five Newton-Schulz steps in the Gram form, by which units are compared, whatever steps they take."""
        return self.count * flops(self.shape, segments(self.shape, 5, torch.float16))

    def only(self, active: Collection[int]) -> Unit:
        """Return the unit without the matrices that are not stepped."""
        return Unit(self.shape, tuple(matrices for matrices in self.ranges if matrices.matrix in active))


def make_units(
    shapes: Sequence[Sequence[int]],
    kinds: Sequence[Hashable],
    accelerated: Sequence[bool] = (),
    max_batch_bytes: int = MAX_BATCH_BYTES,
) -> list[Unit]:
    """Group matrices into units: on a CPU in their order, on accelerators by work.

    Args:
        shapes: whole shapes ``(m, n)`` or ``(B, m, n)`` of a param group's matrices and stacks.
        kinds: what must be equal for matrices to share a unit (process group, device, dtype).
        accelerated: whether each is orthogonalized on an accelerator; empty for none.
        max_batch_bytes: bound on the memory of a unit on an accelerator, as long as it has two matrices.
    """
    if any(accelerated):
        on_device = [i for i, here in enumerate(accelerated) if here]
        on_host = [i for i, here in enumerate(accelerated) if not here]
        of_host = make_units([shapes[i] for i in on_host], [kinds[i] for i in on_host])
        units = [Unit(unit.shape, tuple(r._replace(matrix=on_host[r.matrix]) for r in unit.ranges)) for unit in of_host]
        return units + _units_by_work({i: shapes[i] for i in on_device}, kinds, max_batch_bytes)
    alike: dict[tuple[int, int], list[int]] = {}
    for i, shape in enumerate(shapes):
        if math.prod(shape):
            alike.setdefault((shape[-2], shape[-1]), []).append(i)
    units = []
    for shape, indices in alike.items():
        stacks = {i: math.prod(shapes[i][:-2]) for i in indices}
        size = max(1, min(_BATCH_ELEMENTS // math.prod(shape), sum(stacks.values()) // _UNITS_OF_A_SHAPE))
        by_kind: dict[Hashable, list[int]] = {}
        for i in indices:
            by_kind.setdefault(kinds[i], []).append(i)
        for members in by_kind.values():
            ranges: list[MatrixRange] = []
            room = size
            for i in members:
                start = 0
                while start < stacks[i]:
                    stop = min(stacks[i], start + room)
                    ranges.append(MatrixRange(i, start, stop))
                    room -= stop - start
                    start = stop
                    if not room:
                        units.append(Unit(shape, tuple(ranges)))
                        ranges, room = [], size
            if ranges:
                units.append(Unit(shape, tuple(ranges)))
    return units


def _units_by_work(shapes: Mapping[int, Sequence[int]], kinds: Sequence[Hashable], max_batch_bytes: int) -> list[Unit]:
    """Group matrices into units that fill an accelerator several times over.

    A unit has about `_TILES` tiles of output in its smallest product, unless its memory or its share of all work would
    be too large. Units of one shape have about equally many matrices. Stacks of experts are cut along their first dim
    at common indices, so that ranks that store whole experts of every stack keep their units.
    """
    alike: dict[tuple[tuple[int, int], Hashable], list[int]] = {}
    for i, shape in shapes.items():
        if math.prod(shape):
            alike.setdefault(((shape[-2], shape[-1]), kinds[i]), []).append(i)
    stacks = {i: math.prod(shape[:-2]) for i, shape in shapes.items()}
    total = sum(
        sum(stacks[i] for i in members) * flops(shape, segments(shape, 5, torch.float16))
        for (shape, _), members in alike.items()
    )
    units: list[Unit] = []
    for (shape, _), members in alike.items():
        lengths = segments(shape, 5, torch.float16)
        tiles = math.ceil(min(shape) / _TILE) ** 2
        share = math.ceil(total / _UNITS_OF_ALL / flops(shape, lengths))
        whole = BlockRows(min(shape), min(shape))
        nbytes = working_bytes(shape, lengths, torch.float16, whole)
        fits = min(max_batch_bytes // nbytes, most_elements(max_batch_bytes) // math.prod(shape))
        size = max(1, min(_TILES // tiles, fits, share))
        columns = _columns([stacks[i] for i in members], size)
        for column in range(columns):
            ranges = {i: (stacks[i] * column // columns, stacks[i] * (column + 1) // columns) for i in members}
            units += _even_units(shape, ranges, size)
    return units


def _columns(stacks: Sequence[int], size: int) -> int:
    """Return into how many ranges of indices to cut all stacks: as many as cost at most a fifth more units."""
    whole, columns = sum(stacks), 1
    while columns < _MOST_COLUMNS and all(stack % (2 * columns) == 0 for stack in stacks):
        units = 2 * columns * math.ceil(whole / (2 * columns) / size)
        if units > _MORE_UNITS * math.ceil(whole / size):
            break
        columns *= 2
    return columns


def _even_units(shape: tuple[int, int], ranges: Mapping[int, tuple[int, int]], size: int) -> Iterator[Unit]:
    """Yield units of at most `size` matrices, about equally large, in the order of the matrices' indices."""
    order = sorted((k, i) for i, (start, stop) in ranges.items() for k in range(start, stop))
    count = math.ceil(len(order) / size)
    for u in range(count):
        members = sorted((i, k) for k, i in order[len(order) * u // count : len(order) * (u + 1) // count])
        merged: list[MatrixRange] = []
        for i, k in members:
            if merged and merged[-1].matrix == i and merged[-1].stop == k:
                merged[-1] = merged[-1]._replace(stop=k + 1)
            else:
                merged.append(MatrixRange(i, k, k + 1))
        yield Unit(shape, tuple(merged))


def assign_owners(units: Sequence[Unit], ranks: int, holders: Sequence[Collection[int]] = ()) -> list[int]:
    """Assign an owner to each unit, so that all ranks have about the same work.

    A unit that a rank stores whole need not travel: it stays there unless the rank already has its share of the work.
    All others go, longest first, to the rank with the least work.

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
    if holders:
        for u in order:
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
