"""The momentum of pieces in a step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_muon.distributed.units import Piece
from hf_muon.math.moments import decoded
from hf_muon.math.momentum import BUFFER, SCALE, ahead, move_


class Momentum:
    """The momentum of the matrices of an exchange in one step, which `updates` moves.

    Args:
        moments: the momentum of each matrix, or stack, to step, by its position in the group; local tensors. Several
            matrices in one int8 parameter share its tensors, by whose identity it moves once.
        grads: the gradient of each of them; local tensors.
        momentum: decay of the average.
        nesterov: whether to look one step ahead.
        step: number of the step, which seeds stochastic rounding.
    """

    def __init__(
        self,
        moments: Mapping[int, Mapping[str, Tensor]],
        grads: Mapping[int, Tensor],
        *,
        momentum: float,
        nesterov: bool,
        step: int = 0,
    ) -> None:
        self._moments = moments
        self._grads = grads
        self._options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "step": step}
        # Ids of codes that pieces cut, and that have moved as a whole.
        self._moved: set[int] = set()

    def updates(self, pieces: Sequence[Piece], moved_only: Sequence[Piece] = ()) -> list[Tensor]:
        """Move the momentum of some pieces, and return the updates of those that are not `moved_only`.

        The updates are in new memory, and may be overwritten.
        """
        # Pieces that only move come first, while no updates take memory.
        order = [*((piece, False) for piece in moved_only), *((piece, True) for piece in pieces)]
        updates: list[Tensor] = []
        for (_, cuts, wanted), alike in itertools.groupby(
            order, key=lambda each: (self._moments[each[0].matrix][BUFFER].dtype, self._cuts_blocks(each[0]), each[1])
        ):
            members = [piece for piece, _ in alike]
            if cuts:
                for piece in members:
                    self._move_codes(piece)
                updates += [self._of_codes(piece) for piece in members if wanted]
            else:
                moments = [
                    {key: piece.of(tensor) for key, tensor in self._moments[piece.matrix].items()} for piece in members
                ]
                grads = [piece.of(self._grads[piece.matrix]) for piece in members]
                updates += move_(moments, grads, **self._options, wanted=wanted)
        return updates

    def _cuts_blocks(self, piece: Piece) -> bool:
        return not piece.box.has_whole_rows and SCALE in self._moments[piece.matrix]

    def _move_codes(self, piece: Piece) -> None:
        """Move all codes of a parameter at its first piece that cuts through blocks of them."""
        moments = self._moments[piece.matrix]
        if id(moments[BUFFER]) not in self._moved:
            self._moved.add(id(moments[BUFFER]))
            move_([moments], [self._grads[piece.matrix]], **self._options, wanted=False)

    def _of_codes(self, piece: Piece) -> Tensor:
        """Return the update of a piece that cuts through blocks of codes, from what is stored."""
        rows = {key: piece.box.rows_of(self._moments[piece.matrix][key]) for key in (BUFFER, SCALE)}
        stored = piece.box.columns_of(decoded(rows, BUFFER))
        grad, rate = piece.of(self._grads[piece.matrix]).float(), 1 - self._options["momentum"]
        return ahead(stored, grad, rate) if self._options["nesterov"] else stored
