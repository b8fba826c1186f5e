"""The one seam between mathematics and storage: pieces of updates in, pieces of directions out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_muon.storage.blocks import Cut

if TYPE_CHECKING:
    from hf_muon.distributed.units import Unit


class NewtonSchulz(Protocol):
    """A function from whole matrices ``(B, m, n)`` to their directions ``(B, m, n)``, which it returns in `dtype`.

    With `overwrite` it may write to the matrices, which are contiguous and aligned then, and return directions in their
    memory.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, matrices: Tensor, /, *, overwrite: bool = False) -> Tensor: ...


class Piece(NamedTuple):
    """The elements of a matrix that this rank steps at once: all that it stores, or some of it.

    Attributes:
        matrix: position of the matrix, or stack, among those of its param group.
        local: which matrices of the stored stack, or which elements of the stored slice; None for all.
        cut: which rows or columns of those; None for all.
    """

    matrix: int
    local: slice | None = None
    cut: Cut | None = None

    def of(self, local: Tensor) -> Tensor:
        """Return a view of the piece in a tensor that is stored like the matrix."""
        selected = local if self.local is None else local[self.local]
        return selected if self.cut is None else self.cut.of(selected)


class StepCost(NamedTuple):
    """What one step of all matrices of an executor costs; of ranks, the largest of all.

    Attributes:
        flops: of Newton-Schulz, for each rank of the executor's group; one entry if the executor has no group, in
            which case every process that has such an executor does the same.
        sent_bytes: of updates and directions that each rank sends to others.
        in_flight_bytes: of the updates and directions that a rank has in flight at once.
        unit_bytes: of the buffers for the largest unit on its owner.
        turn: elements of the updates that a rank computes at once, to send them.
    """

    flops: list[int]
    sent_bytes: list[int]
    in_flight_bytes: int
    unit_bytes: int
    turn: int = 0


Directions = Iterator[tuple[list[Piece], list[Tensor]]]
"""Pieces, and for each of them a direction of its shape."""


class UpdatesOf(Protocol):
    """Moves momentum, and computes updates."""

    def __call__(self, pieces: Sequence[Piece], others: Sequence[Piece] = (), /) -> list[Tensor]:
        """Move the momentum of some pieces and return their updates, memory of their own that may be overwritten.

        Args:
            pieces: whose updates are returned.
            others: whose momentum moves, too.
        """
        ...


class Observer(Protocol):
    """Sees what is orthogonalized on its owner, before and after; must not write to it."""

    def updates(self, unit: Unit, updates: Tensor, /) -> None:
        """See the updates of a unit ``(B, m, n)``, which are overwritten next."""
        ...

    def orthogonalized(self, unit: Unit, directions: Tensor, /) -> None:
        """See the directions of a unit ``(B, m, n)``."""
        ...


OwnerRule = Callable[["Unit", Tensor], Tensor]
"""Receives a unit and its directions ``(B, m, n)``, and returns others in their place, of the same dtype."""


class Executor(Protocol):
    """Assembles whole matrices from pieces, has them orthogonalized, and splits the directions into pieces again.

    Attributes:
        observer: sees what this rank orthogonalizes; None for nobody.
        rule: changes the directions of what this rank orthogonalizes, after the observer; None for nothing.
    """

    observer: Observer | None
    rule: OwnerRule | None

    @property
    def device(self) -> torch.device: ...

    def directions(self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz) -> Directions:
        """Yield directions for this rank's pieces of the active matrices, bucket by bucket.

        Args:
            active: positions of the matrices to step; the same on all ranks.
            updates_of: called once for each piece of an active matrix.
            newton_schulz: called on whole matrices, on their owner only.

        Yields:
            Pieces, and for each of them a direction of its shape. The directions may be written to.
        """
        ...

    def order(self, active: Collection[int]) -> list[list[Piece]]:
        """Return the pieces of each call of `updates_of` in a step, in the order of the calls."""
        ...

    def share(self, active: Collection[int], tensors_of: Callable[[Unit], list[Tensor]]) -> None:
        """Copy tensors of units from the unit's owner to all ranks of the executor's group.

        Args:
            active: positions of the matrices that have been stepped.
            tensors_of: returns the tensors of a unit, fp32, of the same shapes on all ranks; they are written to.
        """
        ...

    def cost(self, flops_of: Callable[[Unit], int], direction_dtype: torch.dtype) -> StepCost:
        """Return what a step of all matrices costs, without computing or sending anything.

        Args:
            flops_of: returns the FLOPs of Newton-Schulz on a unit.
            direction_dtype: in which Newton-Schulz returns directions.
        """
        ...


def directions_of(executor: Executor, unit: Unit, updates: Tensor, newton_schulz: NewtonSchulz) -> Tensor:
    """Return the directions of a unit ``(B, m, n)`` on its owner, as rules make them.

    There is no other way from updates to directions, so that every layout orthogonalizes the same batches.

    Args:
        executor: whose observer sees what is orthogonalized, and whose rules are called.
        unit: the matrices.
        updates: of them ``(B, m, n)``, contiguous and aligned; overwritten.
        newton_schulz: orthogonalizes.
    """
    observer = executor.observer
    if observer is not None:
        observer.updates(unit, updates)
    directions = newton_schulz(updates, overwrite=True)
    if observer is not None:
        observer.orthogonalized(unit, directions)
    return directions if executor.rule is None else executor.rule(unit, directions)
