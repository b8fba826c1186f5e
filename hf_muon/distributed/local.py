"""Parameters stored whole, whose step is not shared: one process, or replicas that all take the same step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hf_muon.distributed.executor import NewtonSchulz, Observer, Piece, StepCost, UpdatesOf
from hf_muon.distributed.units import MatrixRange, Unit
from hf_muon.storage.regions import Stored


class LocalExecutor:
    """Orthogonalizes one unit after the other.

    Args:
        units: matrices to orthogonalize together.
        stored: for each matrix or stack, by its position in the param group, all of it as it is stored.
        device: on which matrices are orthogonalized; updates may come from another one.
    """

    def __init__(self, units: Sequence[Unit], stored: Mapping[int, Stored], device: torch.device) -> None:
        self.units = units
        self.stored = stored
        self.device = device
        self.observer: Observer | None = None

    def directions(
        self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> Iterator[tuple[list[Piece], list[Tensor]]]:
        """Yield the directions of one unit at a time, see `Executor`; no tensor of a unit outlives its turn."""
        for unit in self._active(active):
            yield self._of_unit(unit, updates_of, newton_schulz)

    def order(self, active: Collection[int]) -> list[list[Piece]]:
        """Return the pieces of one unit after the other, see `Executor`."""
        return [self._pieces(unit) for unit in self._active(active)]

    def cost(self, flops_of: Callable[[Unit], int], direction_dtype: torch.dtype) -> StepCost:
        """Return what a step costs, see `Executor`. Nothing is sent."""
        largest = max((unit.numel for unit in self.units), default=0)
        # Updates and directions, at four bytes: units are stepped one after the other.
        return StepCost([sum(map(flops_of, self.units))], [0], 0, 2 * 4 * largest)

    def _active(self, active: Collection[int]) -> list[Unit]:
        return [stepped for unit in self.units if (stepped := unit.only(active)).ranges]

    def _of_unit(
        self, unit: Unit, updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> tuple[list[Piece], list[Tensor]]:
        pieces = self._pieces(unit)
        updates = updates_of(pieces)
        shapes = [update.shape for update in updates]
        stacks = [update.reshape(-1, *unit.shape) for update in updates]  # each (b, m, n)
        counts = [len(stack) for stack in stacks]
        batch = (stacks[0] if len(stacks) == 1 else torch.cat(stacks)).to(self.device)  # (B, m, n)
        del updates, stacks
        directions = newton_schulz(batch)  # (B, m, n)
        if self.observer is not None:
            self.observer(unit, batch, directions)
        by_piece = torch.split(directions, counts)
        return pieces, [direction.view(shape) for direction, shape in zip(by_piece, shapes, strict=True)]

    def _pieces(self, unit: Unit) -> list[Piece]:
        return [self._piece(matrices) for matrices in unit.ranges]

    def _piece(self, matrices: MatrixRange) -> Piece:
        (box,) = self.stored[matrices.matrix].boxes(matrices.start, matrices.stop)
        return Piece(matrices.matrix, box.local, box.cut)
