"""Which matrices are orthogonalized together, and where: the same answer on every rank, without talking."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_muon.math import cost

# Beyond this many elements a product fills the hardware by itself, and batching buys nothing.
_BATCH_ELEMENTS = 2**22
# A shape is cut into at least this many units, so that there is something to share out.
_UNITS_OF_A_SHAPE = 8


class MatrixRange(NamedTuple):
    """Matrices `start` to `stop` of the stack at position `matrix`; a single matrix is 0 to 1."""

    matrix: int
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """Matrices of one shape ``(m, n)`` that are orthogonalized in one call, by one owner.

    What stands together never depends on the number of ranks or on the layout. Batched products round differently
    for different batches, and so this is a condition for equal bits everywhere.
    """

    shape: tuple[int, int]
    runs: tuple[MatrixRange, ...]

    @property
    def count(self) -> int:
        """Number of matrices."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def numel(self) -> int:
        return self.count * math.prod(self.shape)

    @property
    def cost(self) -> int:
        """FLOPs of five Newton-Schulz steps in bf16; units are compared by it, whatever steps they take."""
        return self.count * cost.flops(self.shape, cost.segments(self.shape, 5, torch.bfloat16))

    def only(self, active: Collection[int]) -> Unit:
        """The unit without the parameters that are not stepped."""
        return Unit(self.shape, tuple(run for run in self.runs if run.matrix in active))


def make_units(shapes: Sequence[Sequence[int]], kinds: Sequence[Hashable]) -> list[Unit]:
    """Cut parameters into units, in their order.

    Args:
        shapes: whole shapes ``(m, n)`` or ``(B, m, n)`` of a param group's parameters.
        kinds: what must be equal for matrices to share a unit (dtype, device, where they are stored).
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
            runs: list[MatrixRange] = []
            room = size
            for i in members:
                start = 0
                while start < stacks[i]:
                    stop = min(stacks[i], start + room)
                    runs.append(MatrixRange(i, start, stop))
                    room -= stop - start
                    start = stop
                    if not room:
                        units.append(Unit(shape, tuple(runs)))
                        runs, room = [], size
            if runs:
                units.append(Unit(shape, tuple(runs)))
    return units


def assign_owners(units: Sequence[Unit], ranks: int, holders: Sequence[Collection[int]] = ()) -> list[int]:
    """An owner for each unit, such that no rank has much more to do than another.

    A unit that some rank stores whole stays there while that rank has not had its share: such a unit needs not travel.
    All others go, longest first, to the rank with least to do.

    Args:
        units: in an order that all ranks agree on.
        ranks: number of ranks.
        holders: for each unit, the ranks that store all of it; empty where it does not matter.

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
