"""Parameters stored whole, whose step is not shared: one process, or replicas that all take the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_muon.distributed.executor import (
    Directions,
    NewtonSchulz,
    Observer,
    OwnerRule,
    Piece,
    StepCost,
    UpdatesOf,
    directions_of,
)
from hf_muon.distributed.units import MatrixRange, Unit
from hf_muon.math.elementwise import adjacent, is_accelerator, most_elements
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.math.products import is_aligned
from hf_muon.storage.regions import Stored


class Bucket(NamedTuple):
    """Units whose momentum and weights move together.

    Attributes:
        units: with the active matrices alone.
        of_units: the pieces of each of them.
        pieces: of all of them.
    """

    units: tuple[Unit, ...]
    of_units: list[list[Piece]]
    pieces: list[Piece]


class LocalExecutor:
    """Orthogonalizes one unit after the other. On accelerators, momentum and weights of several units move together.

    Args:
        units: matrices to orthogonalize together.
        stored: for each matrix or stack, by its position in the param group, all of it as it is stored.
        device: on which matrices are orthogonalized; updates may come from another one.
        max_batch_bytes: bound on the updates and directions of the units that move together.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stored: Mapping[int, Stored],
        device: torch.device,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        self.units = units
        self.stored = stored
        self.device = device
        self.max_batch_bytes = max_batch_bytes
        self.observer: Observer | None = None
        self.rule: OwnerRule | None = None
        self._planned: tuple[frozenset[int] | None, list[Bucket]] = (None, [])

    def directions(self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz) -> Directions:
        """Yield the directions of one bucket at a time, see `Executor`; no tensor of a bucket outlives its turn."""
        for bucket in self.buckets(frozenset(active)):
            yield self._of_bucket(bucket, updates_of, newton_schulz)

    def order(self, active: Collection[int]) -> list[list[Piece]]:
        """Return the pieces of one bucket after the other, see `Executor`."""
        return [bucket.pieces for bucket in self.buckets(frozenset(active))]

    def share(self, active: Collection[int], tensors_of: Callable[[Unit], list[Tensor]]) -> None:
        """Do nothing, see `Executor`: this process owns every unit."""

    def cost(self, flops_of: Callable[[Unit], int], direction_dtype: torch.dtype) -> StepCost:
        """Return what a step costs, see `Executor`. Nothing is sent."""
        buckets = self.buckets(frozenset(self.stored))
        largest = max((sum(unit.numel for unit in bucket.units) for bucket in buckets), default=0)
        # Updates and directions, at four bytes: buckets are stepped one after the other.
        return StepCost([sum(map(flops_of, self.units))], [0], 0, 2 * 4 * largest)

    def buckets(self, active: frozenset[int]) -> list[Bucket]:
        """Return what is stepped together, in order; that of the last step if it had the same active matrices."""
        if self._planned[0] != active:
            self._planned = active, list(self._buckets(active))
        return self._planned[1]

    def _buckets(self, active: frozenset[int]) -> Iterator[Bucket]:
        units: list[Unit] = []
        for unit in (unit.only(active) for unit in self.units):
            if units and not self._fits([*units, unit]):
                yield self._bucket(units)
                units = []
            if unit.ranges:
                units.append(unit)
        if units:
            yield self._bucket(units)

    def _fits(self, units: Sequence[Unit]) -> bool:
        """Return whether some units are stepped together."""
        if not is_accelerator(self.device):
            return False
        # Updates in fp32, and first copies of small tensors, then directions of two bytes.
        return sum(unit.numel for unit in units) <= min(most_elements(self.max_batch_bytes), self.max_batch_bytes // 6)

    def _bucket(self, units: Sequence[Unit]) -> Bucket:
        pieces = [[self._piece(matrices) for matrices in unit.ranges] for unit in units]
        return Bucket(tuple(units), pieces, [piece for of_unit in pieces for piece in of_unit])

    def _of_bucket(
        self, bucket: Bucket, updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> tuple[list[Piece], list[Tensor]]:
        updates = updates_of(bucket.pieces)
        directions: list[Tensor] = []
        for unit, pieces in zip(bucket.units, bucket.of_units, strict=True):
            own, updates = updates[: len(pieces)], updates[len(pieces) :]
            directions += self._of_unit(unit, own, newton_schulz)
            del own
        return bucket.pieces, directions

    def _of_unit(self, unit: Unit, updates: list[Tensor], newton_schulz: NewtonSchulz) -> list[Tensor]:
        shapes = [update.shape for update in updates]
        counts = [update.numel() // math.prod(unit.shape) for update in updates]
        together = adjacent(updates)
        if together is None:
            together = torch.cat([update.reshape(-1) for update in updates])
        batch = together.view(-1, *unit.shape).to(self.device)  # (B, m, n)
        if not is_aligned(batch):
            batch = batch.clone()
        del updates, together
        directions = directions_of(self, unit, batch, newton_schulz)
        del batch
        by_piece = torch.split(directions, counts)
        return [direction.view(shape) for direction, shape in zip(by_piece, shapes, strict=True)]

    def _piece(self, matrices: MatrixRange) -> Piece:
        (box,) = self.stored[matrices.matrix].boxes(matrices.start, matrices.stop)
        return Piece(matrices.matrix, box.local, box.cut)
