"""Parameters stored whole, whose steps nobody shares: one process, or replicas that all take the same step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hf_muon.distributed.executor import NewtonSchulz, Observer, Piece, UpdatesOf
from hf_muon.distributed.units import MatrixRange, Unit
from hf_muon.storage.regions import Stored


class LocalExecutor:
    """Orthogonalizes units one after the other.

    Args:
        units: what to orthogonalize together.
        stored: for each parameter that takes part, by its position in the param group, all of it as it is stored.
        device: where matrices are orthogonalized; updates may come from another one.
    """

    def __init__(self, units: Sequence[Unit], stored: Mapping[int, Stored], device: torch.device) -> None:
        self.units = units
        self.stored = stored
        self.device = device
        self.observer: Observer | None = None

    def directions(
        self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> Iterator[tuple[list[Piece], list[Tensor]]]:
        """See `Executor`. Of a unit nothing is held here while the next one is orthogonalized."""
        for unit in self.units:
            kept = unit.only(active)
            if kept.runs:
                yield self._of_unit(kept, updates_of, newton_schulz)

    def _of_unit(
        self, unit: Unit, updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> tuple[list[Piece], list[Tensor]]:
        pieces = [self._piece(run) for run in unit.runs]
        updates = updates_of(pieces)
        shapes = [update.shape for update in updates]
        stacks = [update.reshape(-1, *unit.shape) for update in updates]  # each (b, m, n)
        counts = [len(stack) for stack in stacks]
        batch = (stacks[0] if len(stacks) == 1 else torch.cat(stacks)).to(self.device)  # (B, m, n)
        del updates, stacks
        found = newton_schulz(batch)
        if self.observer is not None:
            self.observer(unit, batch, found)
        parts = torch.split(found, counts)
        return pieces, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _piece(self, run: MatrixRange) -> Piece:
        (part,) = self.stored[run.matrix].parts(run.start, run.stop)
        return Piece(run.matrix, part.local, part.cut)
