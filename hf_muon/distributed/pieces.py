"""The one seam between mathematics and storage: what an `Exchange` is given, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from hf_muon.storage.boxes import Box

if TYPE_CHECKING:
    from hf_muon.distributed.units import Unit


class Piece(NamedTuple):
    """The elements of a matrix that this rank steps at once.

    Attributes:
        matrix: position of the matrix, or stack, among those of its param group.
        box: some of what this rank stores of it; None for all.
    """

    matrix: int
    box: Box | None = None

    def of(self, local: Tensor) -> Tensor:
        """Return a view of the piece in a tensor that is stored like the matrix."""
        return local if self.box is None else self.box.of(local)

    @property
    def cuts_rows(self) -> bool:
        """Whether it has a part of what this rank stores of rows."""
        return self.box is not None and not self.box.has_whole_rows


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


class DirectionsOf(Protocol):
    """Orthogonalizes whole matrices, on their owner."""

    def __call__(self, unit: Unit, updates: Tensor, /) -> Tensor:
        """Return the directions of a unit ``(B, m, n)``.

        Args:
            unit: the matrices.
            updates: of them, ``(B, m, n)``, contiguous and aligned; they may be overwritten.
        """
        ...
