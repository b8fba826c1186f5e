"""Who stores what of the matrices of an exchange, and which rank sends it to the owner of a unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_muon.distributed.pieces import Piece
from hf_muon.distributed.units import MatrixRange, Unit
from hf_muon.storage.boxes import Box, Held


class Replicas:
    """Which ranks store the same of a matrix. What any two ranks store is either equal or disjoint.

    Args:
        regions: what each rank stores.
    """

    def __init__(self, regions: Sequence[Held]) -> None:
        alike: dict[Held, list[int]] = {}
        for rank, region in enumerate(regions):
            alike.setdefault(region, []).append(rank)
        self._position = [0] * len(regions)  # of each rank among those that store the same
        self._count = [0] * len(regions)
        for members in alike.values():
            for position, rank in enumerate(members):
                self._position[rank], self._count[rank] = position, len(members)
        self._period = math.lcm(*(len(members) for region, members in alike.items() if region.numel))

    def sends(self, rank: int, owner: int) -> bool:
        """Return whether a rank sends its region to an owner: of ranks that store the same, exactly one does.

        It is the owner itself if the owner stores the region, and otherwise the rank in the owner's replica.
        """
        return self._position[owner] % self._count[rank] == self._position[rank]

    def phase(self, owner: int) -> int:
        """Return the phase of an owner in the send pattern, which is periodic in the owner's replica index.

        Owners with equal phases receive non-empty regions from the same ranks.
        """
        return self._position[owner] % self._period


class Pattern:
    """How a unit is distributed over the ranks; the same for all units of one shape that are stored alike.

    Args:
        numel: of the unit.
        ranges: for each matrix range of the unit, the elements that each rank stores, and who stores the same.

    Attributes:
        stored: elements that each rank stores.
        on_ranks: the same as a tensor, ``(ranks,)``.
        total: of all ranks together.
        holders: ranks that store all of the unit.
    """

    def __init__(self, numel: int, ranges: Sequence[tuple[Sequence[int], Replicas]]) -> None:
        self._ranges = ranges
        self.stored = [sum(on_rank) for on_rank in zip(*(stored for stored, _ in ranges), strict=True)]
        self.on_ranks = torch.tensor(self.stored)
        self.total = sum(self.stored)
        self.holders = tuple(rank for rank, stored in enumerate(self.stored) if stored == numel)
        self._sent: dict[tuple[int, ...], Tensor] = {}

    def sent_to(self, owner: int) -> Tensor:
        """Return the elements that each rank sends to the owner, ``(ranks,)``, including the owner's own."""
        phases = tuple(replicas.phase(owner) for _, replicas in self._ranges)
        if phases not in self._sent:
            sent = [0] * len(self.stored)
            for stored, replicas in self._ranges:
                for rank, numel in enumerate(stored):
                    if numel and replicas.sends(rank, owner):
                        sent[rank] += numel
            self._sent[phases] = torch.tensor(sent)
        return self._sent[phases]


class Holdings:
    """Who stores what of some matrices.

    Args:
        regions: for each matrix or stack, by its position in the param group, the region of each rank. Matrices that
            are stored alike should share one object, by whose id results are cached.
        ranks: number of ranks.
    """

    def __init__(self, regions: Mapping[int, Sequence[Held]], ranks: int) -> None:
        self.regions = regions
        self.ranks = ranks
        self._replicas: dict[int, Replicas] = {}
        self._stored: dict[tuple[int, int, int], list[int]] = {}
        self._patterns: dict[tuple[tuple[int, int, int], ...], Pattern] = {}

    def replicas(self, matrix: int) -> Replicas:
        """Return which ranks store the same of a matrix."""
        regions = self.regions[matrix]
        if id(regions) not in self._replicas:
            self._replicas[id(regions)] = Replicas(regions)
        return self._replicas[id(regions)]

    def pattern(self, unit: Unit) -> Pattern:
        """Return how a unit is distributed over the ranks."""
        key = tuple((id(self.regions[matrix]), start, stop) for matrix, start, stop in unit.ranges)
        if key not in self._patterns:
            ranges = [(self._stored_of(matrices), self.replicas(matrices.matrix)) for matrices in unit.ranges]
            self._patterns[key] = Pattern(unit.numel, ranges)
        return self._patterns[key]

    def _stored_of(self, matrices: MatrixRange) -> list[int]:
        """Return the elements of a matrix range that each rank stores."""
        regions = self.regions[matrices.matrix]
        start, stop = matrices.start, matrices.stop
        key = (id(regions), start, stop)
        if key not in self._stored:
            self._stored[key] = [sum(box.numel for box in region.boxes(start, stop)) for region in regions]
        return self._stored[key]

    def boxes(self, unit: Unit, rank: int) -> list[tuple[Piece, Box]]:
        """Return what a rank stores of a unit, in the order in which it stores it, with its box of the unit's batch."""
        boxes = []
        position = 0
        for matrix, start, stop in unit.ranges:
            for box in self.regions[matrix][rank].boxes(start, stop):
                boxes.append((Piece(matrix, box), box._replace(first=position + box.first)))
            position += stop - start
        return boxes
