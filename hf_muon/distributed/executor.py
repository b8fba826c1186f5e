"""The one seam between mathematics and storage: pieces of updates in, pieces of directions out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_muon.storage.views import Cut

if TYPE_CHECKING:
    from hf_muon.distributed.units import Unit


class NewtonSchulz(Protocol):
    """Whole matrices ``(B, m, n)`` to their directions ``(B, m, n)``, which come in `dtype`."""

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, matrices: Tensor, /) -> Tensor: ...


class Piece(NamedTuple):
    """What of a parameter is stepped at once: all that this rank stores of it, or some of that.

    Attributes:
        matrix: its position among those of its param group.
        local: which matrices of the stored stack, or which elements of the stored slice; None for all.
        cut: which rows or columns of that; None for all.
    """

    matrix: int
    local: slice | None = None
    cut: Cut | None = None

    def of(self, local: Tensor) -> Tensor:
        """The piece of a tensor that is stored like the parameter; a view."""
        found = local if self.local is None else local[self.local]
        return found if self.cut is None else self.cut.of(found)


UpdatesOf = Callable[[Sequence[Piece]], list[Tensor]]
"""Moves the momentum of some pieces and gives their updates, which are not written to."""


Observer = Callable[["Unit", Tensor, Tensor], None]
"""Is shown a unit, its updates and its directions ``(B, m, n)``, on the rank that has orthogonalized it; reads only."""


class Executor(Protocol):
    """Brings the pieces of matrices together, has them orthogonalized, and takes the directions apart again.

    Attributes:
        observer: is shown what this rank orthogonalizes, if anybody wants to see it.
    """

    observer: Observer | None

    @property
    def device(self) -> torch.device: ...

    def directions(
        self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> Iterator[tuple[list[Piece], list[Tensor]]]:
        """Directions for this rank's pieces of the active parameters, bucket by bucket.

        Args:
            active: positions in the param group of the parameters to step; the same on all ranks.
            updates_of: called once for each piece of an active parameter.
            newton_schulz: called on whole matrices, on their owner only.

        Yields:
            Pieces, and a direction for each of them, of its shape. The directions may be written to.
        """
        ...
