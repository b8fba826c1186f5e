"""Moments in a step. Those on the host are copied to the device and back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hf_muon.distributed.units import Piece
from hf_muon.math.adamw import Stepped, adamw_, chunks, uses_fused_adamw
from hf_muon.math.elementwise import chunk_size
from hf_muon.math.moments import decoded
from hf_muon.math.momentum import BUFFER, SCALE, ahead, move_
from hf_muon.storage.transport import Moments, Transport


class Momentum:
    """The momentum of the pieces of an exchange in one step; a context manager, in which `updates` moves it.

    Momentum on the host is copied to the device of its gradient for each call.

    Args:
        moments: the momentum of each matrix, or stack, to step, by its position in the group; local tensors. Several
            matrices in one int8 parameter share its tensors, by whose identity it moves once.
        grads: the gradient of each of them; local tensors.
        calls: the pieces of each call of `updates`, in order, as `Exchange.order` returns them.
        momentum: decay of the average.
        nesterov: whether to look one step ahead.
        step: number of the step, which seeds stochastic rounding.
    """

    def __init__(
        self,
        moments: Mapping[int, Moments],
        grads: Mapping[int, Tensor],
        calls: Sequence[Sequence[Piece]],
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
        self._transport: Transport | None = None
        for k in dict.fromkeys(piece.matrix for pieces in calls for piece in pieces):
            if moments[k][BUFFER].device.type != grads[k].device.type:
                turns = [[self._stored(piece) for piece in pieces] for pieces in calls]
                self._transport = Transport(grads[k].device, turns)
                break

    def __enter__(self) -> Momentum:
        return self

    def __exit__(self, *error: object) -> None:
        if self._transport is not None:
            self._transport.synchronize()

    def updates(self, pieces: Sequence[Piece], moved_only: Sequence[Piece] = ()) -> list[Tensor]:
        """Move the momentum of the pieces of the next call, and return the updates of those that are not `moved_only`.

        The updates are in new memory, and may be overwritten.
        """
        every = [*pieces, *moved_only]
        # Pieces that only move come first, while no updates take memory.
        order = [*range(len(pieces), len(every)), *range(len(pieces))]
        updates: list[Tensor] = []
        with self._present(every) as present:
            for (_, cuts, wanted), alike in itertools.groupby(
                order, key=lambda k: (present[k][BUFFER].dtype, self._cuts_blocks(every[k]), k < len(pieces))
            ):
                members = list(alike)
                if cuts:
                    for k in members:
                        self._move_codes(every[k], present[k])
                    updates += [self._of_codes(every[k], present[k]) for k in members if wanted]
                else:
                    grads = [every[k].of(self._grads[every[k].matrix]) for k in members]
                    updates += move_([present[k] for k in members], grads, **self._options, wanted=wanted)
        return updates

    def _present(self, pieces: Sequence[Piece]) -> AbstractContextManager[Sequence[Moments]]:
        """Return the momentum of the pieces of the next call, where their gradients are."""
        if self._transport is not None:
            return self._transport.turn()
        return contextlib.nullcontext([self._stored(piece) for piece in pieces])

    def _stored(self, piece: Piece) -> Moments:
        """Return the stored momentum tensors that a piece needs: views of the piece, or all codes if it cuts blocks."""
        stored = self._moments[piece.matrix]
        return stored if self._cuts_blocks(piece) else {key: piece.of(tensor) for key, tensor in stored.items()}

    def _cuts_blocks(self, piece: Piece) -> bool:
        return not piece.box.has_whole_rows and SCALE in self._moments[piece.matrix]

    def _move_codes(self, piece: Piece, present: Moments) -> None:
        """Move all codes of a parameter at its first piece that cuts through blocks of them."""
        codes = self._moments[piece.matrix][BUFFER]
        if id(codes) not in self._moved:
            self._moved.add(id(codes))
            move_([present], [self._grads[piece.matrix]], **self._options, wanted=False)

    def _of_codes(self, piece: Piece, present: Moments) -> Tensor:
        """Return the update of a piece that cuts through blocks of codes, from what is stored."""
        rows = {key: piece.box.rows_of(present[key]) for key in (BUFFER, SCALE)}
        stored = piece.box.columns_of(decoded(rows, BUFFER))
        grad, rate = piece.of(self._grads[piece.matrix]).float(), 1 - self._options["momentum"]
        return ahead(stored, grad, rate) if self._options["nesterov"] else stored


def adamw_offloaded_(stepped: Sequence[Stepped], **options: Any) -> None:
    """Take the step of `adamw_` with moments that are stored on the host.

    Args:
        stepped: as in `adamw_`.
        **options: the other arguments of `adamw_`.
    """
    for device, alike in itertools.groupby(stepped, key=lambda whole: whole.param.device):
        most = chunk_size(device)
        turns: list[list[Stepped]] = [[]]
        for chunk in (chunk for whole in alike for chunk in chunks(whole, most)):
            if turns[-1] and sum(other.param.numel() for other in turns[-1]) + chunk.param.numel() > most:
                turns.append([])
            turns[-1].append(chunk)
        transport = Transport(device, [[_without_step(chunk.state) for chunk in turn] for turn in turns])
        try:
            for turn in turns:
                with transport.turn() as present:
                    adamw_([_with_counter(*arrived) for arrived in zip(turn, present, strict=True)], **options)
        finally:
            transport.synchronize()
    # Chunks have had separate counters.
    for whole in stepped:
        whole.state["step"] += 1


def _without_step(state: Moments) -> Moments:
    return {key: value for key, value in state.items() if key != "step"}


def _with_counter(chunk: Stepped, moments: Moments) -> Stepped:
    """Return a chunk with moments on its device, and with a separate step counter where its kernel reads that."""
    alike = all(moment.dtype is chunk.param.dtype for moment in moments.values())
    device = chunk.param.device if alike and uses_fused_adamw([chunk.param]) else "cpu"
    # Offloaded counters are on the host, so that reading one waits for nothing.
    step = torch.full((), chunk.state["step"].item(), dtype=torch.float32, device=device)
    return Stepped(chunk.param, chunk.grad, {"step": step, **moments})
