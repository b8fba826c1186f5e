"""Which matrices are orthogonalized together, and by which rank; all ranks compute the same without communication."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_muon.math.cost import flops, segments

# A product of this many elements fills the hardware by itself, and batching gains nothing.
_BATCH_ELEMENTS = 2**22
# Matrices of one shape make at least this many units, so that ranks can share them.
_UNITS_OF_A_SHAPE = 8


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
        """FLOPs of five Newton-Schulz steps in bf16, by which units are compared, whatever steps they take."""
        return self.count * flops(self.shape, segments(self.shape, 5, torch.bfloat16))

    def only(self, active: Collection[int]) -> Unit:
        """Return the unit without the matrices that are not stepped."""
        return Unit(self.shape, tuple(matrices for matrices in self.ranges if matrices.matrix in active))


def make_units(shapes: Sequence[Sequence[int]], kinds: Sequence[Hashable]) -> list[Unit]:
    """Group matrices into units, in their order.

    Args:
        shapes: whole shapes ``(m, n)`` or ``(B, m, n)`` of a param group's matrices and stacks.
        kinds: what must be equal for matrices to share a unit (process group, device, dtype).
    """
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
