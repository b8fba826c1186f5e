"""Parameters stored whole, whose steps nobody shares: one process, or replicas that all take the same step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hf_muon.distributed.base import NewtonSchulz, Observer, Piece, UpdatesOf
from hf_muon.distributed.layout import Stored
from hf_muon.distributed.ownership import Run, Unit


class LocalExecutor:
    """Orthogonalizes units one after the other.

    Args:
        units: what to orthogonalize together.
        stored: for each parameter that takes part, by its position in the param group, all of it as it is stored.
        device: where matrices are orthogonalized; updates may come from another one.
        max_bucket_bytes: bound on updates and directions held at once, counted in fp32; at least one unit is.
    """

    def __init__(
        self, units: Sequence[Unit], stored: Mapping[int, Stored], device: torch.device, max_bucket_bytes: int
    ) -> None:
        self.stored = stored
        self.device = device
        self.observer: Observer | None = None
        self.buckets: list[list[Unit]] = []
        room = 0
        for unit in units:
            size = 2 * 4 * unit.numel
            if size > room:
                self.buckets.append([])
                room = max_bucket_bytes
            self.buckets[-1].append(unit)
            room -= size

    def directions(
        self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> Iterator[tuple[list[Piece], list[Tensor]]]:
        """See `Executor`."""
        for bucket in self.buckets:
            units = [kept for unit in bucket if (kept := unit.only(active)).runs]
            if not units:
                continue
            pieces = [self._piece(run) for unit in units for run in unit.runs]
            updates = updates_of(pieces)
            directions: list[Tensor] = []
            for unit in units:
                mine = updates[len(directions) : len(directions) + len(unit.runs)]
                stacks = [update.reshape(-1, *unit.shape) for update in mine]  # each (b, m, n)
                batch = stacks[0] if len(stacks) == 1 else torch.cat(stacks)  # (B, m, n)
                whole = batch.to(self.device)
                found = newton_schulz(whole)
                if self.observer is not None:
                    self.observer(unit, whole, found)
                parts = torch.split(found, [len(stack) for stack in stacks])
                directions += [part.view(update.shape) for part, update in zip(parts, mine, strict=True)]
            yield pieces, directions

    def _piece(self, run: Run) -> Piece:
        (part,) = self.stored[run.param].parts(run.start, run.stop)
        return Piece(run.param, part.local, part.cut)
