"""Who stores what of the parameters of an exchange, and which rank sends it to the owner of a unit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_muon.distributed.executor import Piece
from hf_muon.distributed.units import MatrixRange, Unit
from hf_muon.storage.regions import Ranges, Stored


@dataclass(frozen=True)
class BatchBox:
    """What one rank stores of a run of matrices, and where it belongs in the unit's batch ``(B, m, n)``.

    Attributes:
        piece: where that rank finds it.
        stored: its shape there.
        shape: of the data, ``(b, rows, columns)``.
        matrices: positions in the batch.
        rows: indices of its rows in each whole matrix.
        columns: indices of its columns.
    """

    piece: Piece
    stored: tuple[int, ...]
    shape: tuple[int, int, int]
    matrices: slice
    rows: Ranges
    columns: Ranges

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def places(self) -> Iterator[tuple[slice, slice, slice, slice]]:
        """Rows and columns of the data, and rows and columns of the whole matrices that they are."""
        row = 0
        for top, bottom in self.rows:
            column = 0
            for left, right in self.columns:
                yield (
                    slice(row, row + bottom - top),
                    slice(column, column + right - left),
                    slice(top, bottom),
                    slice(left, right),
                )
                column += right - left
            row += bottom - top

    def write(self, data: Tensor, batch: Tensor) -> None:
        """Put the data into the whole matrices."""
        for rows, columns, into_rows, into_columns in self.places():
            batch[self.matrices, into_rows, into_columns] = data[:, rows, columns]

    def read(self, batch: Tensor, data: Tensor) -> None:
        """Take the data out of the whole matrices."""
        for rows, columns, from_rows, from_columns in self.places():
            data[:, rows, columns] = batch[self.matrices, from_rows, from_columns]


class Replicas:
    """Which ranks store the same of a parameter. What any two ranks store of it is the same, or has nothing in common.

    Args:
        regions: what each rank stores.
    """

    def __init__(self, regions: Sequence[Stored]) -> None:
        alike: dict[Stored, list[int]] = {}
        for rank, region in enumerate(regions):
            alike.setdefault(region, []).append(rank)
        self._position = [0] * len(regions)
        self._count = [0] * len(regions)
        for members in alike.values():
            for position, rank in enumerate(members):
                self._position[rank], self._count[rank] = position, len(members)
        self._period = math.lcm(*(len(members) for region, members in alike.items() if region.numel))

    def sends(self, rank: int, owner: int) -> bool:
        """Whether a rank sends its region to an owner: of ranks that store the same, exactly one does.

        It is the owner itself where the owner stores it, and else the rank of the owner's replica.
        """
        return self._position[owner] % self._count[rank] == self._position[rank]

    def kind(self, owner: int) -> int:
        """A number that is the same for owners to which the same ranks send what is not empty."""
        return self._position[owner] % self._period


class Pattern:
    """How a unit lies on the ranks; the same for all units of one shape that are stored alike.

    Args:
        numel: of the unit.
        runs: for each run of the unit, the elements that each rank stores, and who stores the same.

    Attributes:
        stored: elements that each rank stores.
        total: of all ranks together.
        holders: ranks that store all of it.
    """

    def __init__(self, numel: int, runs: Sequence[tuple[Sequence[int], Replicas]]) -> None:
        self._runs = runs
        self.stored = [sum(on_rank) for on_rank in zip(*(stored for stored, _ in runs), strict=True)]
        self.on_ranks = torch.tensor(self.stored)
        self.total = sum(self.stored)
        self.holders = tuple(rank for rank, stored in enumerate(self.stored) if stored == numel)
        self._sent: dict[tuple[int, ...], Tensor] = {}

    def sent_to(self, owner: int) -> Tensor:
        """Elements that each rank sends to the owner, ``(ranks,)``; what the owner has itself is among them."""
        kind = tuple(replicas.kind(owner) for _, replicas in self._runs)
        if kind not in self._sent:
            sent = [0] * len(self.stored)
            for stored, replicas in self._runs:
                for rank, numel in enumerate(stored):
                    if numel and replicas.sends(rank, owner):
                        sent[rank] += numel
            self._sent[kind] = torch.tensor(sent)
        return self._sent[kind]


class Holdings:
    """Who stores what of some parameters.

    Args:
        regions: for each parameter that takes part, by its position in the param group, the region of each rank.
            Parameters that are stored alike should share one object.
        ranks: number of ranks.
    """

    def __init__(self, regions: Mapping[int, Sequence[Stored]], ranks: int) -> None:
        self.regions = regions
        self.ranks = ranks
        self._replicas: dict[int, Replicas] = {}
        self._stored: dict[tuple[int, int, int], list[int]] = {}
        self._patterns: dict[tuple[tuple[int, int, int], ...], Pattern] = {}

    def replicas(self, param: int) -> Replicas:
        """Which ranks store the same of a parameter."""
        regions = self.regions[param]
        if id(regions) not in self._replicas:
            self._replicas[id(regions)] = Replicas(regions)
        return self._replicas[id(regions)]

    def pattern(self, unit: Unit) -> Pattern:
        """How a unit lies on the ranks."""
        key = tuple((id(self.regions[run.matrix]), run.start, run.stop) for run in unit.runs)
        if key not in self._patterns:
            runs = [(self._stored_of(run), self.replicas(run.matrix)) for run in unit.runs]
            self._patterns[key] = Pattern(unit.numel, runs)
        return self._patterns[key]

    def _stored_of(self, run: MatrixRange) -> list[int]:
        """Elements of a run that each rank stores."""
        regions = self.regions[run.matrix]
        key = (id(regions), run.start, run.stop)
        if key not in self._stored:
            self._stored[key] = [sum(part.numel for part in region.parts(run.start, run.stop)) for region in regions]
        return self._stored[key]

    def blocks(self, unit: Unit, rank: int) -> list[BatchBox]:
        """What a rank stores of a unit, as it finds it."""
        blocks = []
        position = 0
        for run in unit.runs:
            for part in self.regions[run.matrix][rank].parts(run.start, run.stop):
                if part.numel:
                    first = position + part.first
                    piece, matrices = Piece(run.matrix, part.local, part.cut), slice(first, first + part.count)
                    blocks.append(BatchBox(piece, part.stored, part.shape, matrices, part.rows, part.columns))
            position += run.stop - run.start
        return blocks
