"""The step of parameters whose moments are stored on the host: brought to the device unit by unit, and taken back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.distributed.exchange import Exchange
from hf_muon.distributed.pieces import Piece, UpdatesOf
from hf_muon.math.adamw import Stepped, adamw_, chunks, uses_fused_adamw
from hf_muon.math.elementwise import chunk_size
from hf_muon.math.momentum import BUFFER, SCALE, MomentumBuffers
from hf_muon.storage.transport import Transport

Moments = Mapping[str, Tensor]


class OffloadedMomentum:
    """What `MomentumBuffers` does, with momentum that is brought to the device of the products for each call.

    Args:
        state: the momentum of each matrix, or stack, to step, by its position in the group; local tensors.
        grads: the gradient of each of them; local tensors.
        device: of the products.
        calls: the pieces of each call of `updates`, in order.
        **options: of `MomentumBuffers`.
    """

    def __init__(
        self,
        state: Mapping[int, Moments],
        grads: Mapping[int, Tensor],
        device: torch.device,
        calls: Sequence[Sequence[Piece]],
        **options: Any,
    ) -> None:
        self._state = state
        self._grads = grads
        self._device = device
        self._options = options
        self._moved: set[int] = set()  # ids of codes
        # Pieces that cut through blocks have all codes of their parameter; those of one parameter share them in a call.
        self._parts = [[self._stored(piece) for piece in pieces] for pieces in calls]
        self._tensors = [_distinct(parts) for parts in self._parts]
        self._call = 0
        self.transport = Transport(device, self._tensors)

    def updates(self, pieces: Sequence[Piece], others: Sequence[Piece] = ()) -> list[Tensor]:
        """Move the momentum of the pieces of the next call, and return the updates of those that are not `others`."""
        parts, tensors = self._parts[self._call], self._tensors[self._call]
        self._call += 1
        present = dict(zip(map(id, tensors), self.transport.bring(), strict=True))
        state, grads, own, moved = {}, {}, [], set()
        for k, (piece, part) in enumerate(zip([*pieces, *others], parts, strict=True)):
            state[k] = {key: present[id(stored)] for key, stored in part.items()}
            grad = self._grads[piece.matrix]
            if part[BUFFER] is self._state[piece.matrix][BUFFER]:
                own.append(Piece(k, piece.box))
            else:
                own.append(Piece(k))
                grad = piece.of(grad)
            grads[k] = grad.to(self._device)
            if SCALE in part and id(part[BUFFER]) in self._moved:
                moved.add(k)
        updates = MomentumBuffers(state, grads, **self._options, moved=moved).updates(
            own[: len(pieces)], own[len(pieces) :]
        )
        self._moved |= {id(part[BUFFER]) for part in parts if SCALE in part}
        self.transport.take_back()
        return updates

    def _stored(self, piece: Piece) -> dict[str, Tensor]:
        """Return the tensors that a piece needs of the stored momentum: views of its own, or all of them."""
        stored = self._state[piece.matrix]
        if SCALE in stored and piece.cuts_rows:
            return dict(stored)
        return {key: piece.of(tensor) for key, tensor in stored.items()}


def _distinct(parts: Sequence[Moments]) -> list[Tensor]:
    """Return the tensors of some parts, each once."""
    return list({id(tensor): tensor for part in parts for tensor in part.values()}.values())


@contextlib.contextmanager
def updates_for(
    exchange: Exchange,
    active: Collection[int],
    state: Mapping[int, Moments],
    grads: Mapping[int, Tensor],
    *,
    is_offloaded: bool,
    **options: Any,
) -> Iterator[UpdatesOf]:
    """Return what computes the updates for an exchange.

    Args:
        exchange: of a Muon group.
        active: positions of the matrices to step.
        state: the momentum of each of them, by its position in the group; local tensors.
        grads: the gradient of each of them; local tensors.
        is_offloaded: whether some of the momentum is stored on the host.
        **options: of `MomentumBuffers`.
    """
    if not is_offloaded:
        yield MomentumBuffers(state, grads, **options).updates
        return
    momentum = OffloadedMomentum(state, grads, exchange.device, exchange.order(active), **options)
    with momentum.transport:
        yield momentum.updates


def adamw_offloaded_(stepped: Sequence[Stepped], **options: Any) -> None:
    """Take the step of `adamw_` with moments that are stored on the host.

    Args:
        stepped: see `adamw_`.
        **options: of `adamw_`.
    """
    for device, alike in itertools.groupby(stepped, key=lambda own: own.param.device):
        most = chunk_size(device)
        turns: list[list[Stepped]] = [[]]
        for chunk in (chunk for own in alike for chunk in chunks(own, most)):
            if turns[-1] and sum(other.param.numel() for other in turns[-1]) + chunk.param.numel() > most:
                turns.append([])
            turns[-1].append(chunk)
        with Transport(
            device, [[moment for own in turn for moment in _moments(own).values()] for turn in turns]
        ) as way:
            for turn in turns:
                tensors = iter(way.bring())
                adamw_([_on_device(own, tensors) for own in turn], **options)
                way.take_back()
    for own in stepped:
        own.state["step"] += 1


def _moments(own: Stepped) -> dict[str, Tensor]:
    return {key: value for key, value in own.state.items() if key != "step"}


def _on_device(own: Stepped, tensors: Iterator[Tensor]) -> Stepped:
    """Return a chunk with the next tensors as its moments, and with a counter of its own."""
    alike = all(moment.dtype is own.param.dtype for moment in _moments(own).values())
    device = own.param.device if alike and uses_fused_adamw([own.param]) else "cpu"
    step = torch.full((), own.state["step"].item(), dtype=torch.float32, device=device)
    return Stepped(own.param, own.grad, {"step": step, **{key: next(tensors) for key in _moments(own)}})
