"""The momentum of matrices: an exponential moving average of their gradients.

A step computes in fp32, or in the dtype of a wider parameter. How a value is rounded depends on the value, its block
and the number of the step alone, and blocks lie within the rows of a matrix: layouts do not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from hf_muon.math.codes import BLOCK, SQUARES, Piece, Quantized, check_blocks, codes_of
from hf_muon.math.elementwise import Elementwise, Number, over, padded_rows, shaped_like
from hf_muon.math.moments import MOMENTS
from hf_muon.math.rounding import Salt, salt, salted_bf16

BUFFER = "momentum_buffer"
SCALE = MOMENTS[BUFFER].scale


def update_dtype(param: Tensor, momentum_dtype: str = "auto") -> torch.dtype:
    """Return the dtype in which a step computes updates."""
    if momentum_dtype in ("auto", "fp32"):
        return torch.promote_types(param.dtype, torch.float32)
    return torch.float32


def _move_(buffer: Tensor, grad: Tensor, rate: Number) -> Tensor:
    """Move an average towards a gradient by `rate`."""
    return buffer.add_((grad - buffer).mul_(rate))


def _ahead(moved: Tensor, grad: Tensor, rate: Number) -> Tensor:
    """Return the average one step ahead, if the gradient stays the same."""
    return moved - (moved - grad).mul_(rate)


def _move(buffer: Tensor, grad: Tensor, update: Tensor, rate: Number, step_salt: Salt, *, nesterov: bool) -> None:
    """Move a buffer towards a gradient by `rate`, in the dtype of the update."""
    grad = grad.to(update.dtype)
    moved = _move_(buffer.to(update.dtype), grad, rate)
    update.copy_(_ahead(moved, grad, rate) if nesterov else moved)
    if buffer.dtype is torch.bfloat16:
        buffer.copy_(salted_bf16(moved, step_salt))


def _move_alone(buffer: Tensor, grad: Tensor, rate: Number, step_salt: Salt) -> None:
    """Move a buffer as `_move` does, where nobody needs the update."""
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    moved = _move_(buffer.to(dtype), grad.to(dtype), rate)
    if buffer.dtype is torch.bfloat16:
        buffer.copy_(salted_bf16(moved, step_salt))


def _move_codes(codes: Tensor, scales: Tensor, grad: Tensor, update: Tensor, rate: Number, *, nesterov: bool) -> None:
    """Move a buffer of 8 bits, in blocks ``(R, BLOCK)``, and compute updates from what is stored."""
    check_blocks(codes)
    grad = grad.float()
    exact = SQUARES.fractions(codes) * scales.unsqueeze(-1)
    nearest, largest = codes_of(_move_(exact, grad, rate), SQUARES)
    stored = SQUARES.fractions(nearest) * largest
    update.copy_(_ahead(stored, grad, rate) if nesterov else stored)
    codes.copy_(nearest)
    scales.copy_(largest.squeeze(-1))


MOVE = Elementwise(_move, reads=(0, 1), writes=(0, 2))
MOVE_ALONE = Elementwise(_move_alone, reads=(0, 1), writes=(0,))
MOVE_CODES = Elementwise(_move_codes, reads=(0, 1, 2), writes=(0, 1, 3), row=BLOCK)


def _are_stacks(tensors: Sequence[Tensor]) -> bool:
    """Return whether all are ``(B, m, n)`` without gaps within their matrices."""
    return all(tensor.ndim == 3 and tensor[0].is_contiguous() for tensor in tensors)


class MomentumBuffers:
    """The momentum of the matrices of a param group in one step, an exponential moving average of their gradients.

    ::

        buffer = momentum * buffer + (1 - momentum) * grad
        update = momentum * buffer + (1 - momentum) * grad      # with nesterov, else the buffer

    Args:
        state: the momentum of each matrix, or stack, to step, by its position in the group; local tensors. Several
            matrices in one int8 parameter share its tensors, by whose identity it moves once.
        grads: the gradient of each of them; local tensors.
        momentum: decay of the average.
        nesterov: whether to look one step ahead.
        step: number of the step, which seeds stochastic rounding.
        moved: positions of int8 matrices whose momentum has moved in this step already.
    """

    def __init__(
        self,
        state: Mapping[int, Mapping[str, Tensor]],
        grads: Mapping[int, Tensor],
        *,
        momentum: float,
        nesterov: bool,
        step: int = 0,
        moved: Collection[int] = (),
    ) -> None:
        self._buffers = {k: tensors[BUFFER] for k, tensors in state.items()}
        self._blocks = {
            k: Quantized(tensors[BUFFER], tensors[SCALE]) for k, tensors in state.items() if SCALE in tensors
        }
        self._grads = grads
        self._momentum = momentum
        self._nesterov = nesterov
        self._step = step
        self._unmoved = {blocks.codes for k, blocks in self._blocks.items() if k not in moved}

    def updates(self, pieces: Sequence[Piece], others: Sequence[Piece] = ()) -> list[Tensor]:
        """Move the momentum of some pieces and return their updates. Call it once for each piece of a step.

        The updates are memory of their own, which may be overwritten.

        Args:
            pieces: whose updates are returned.
            others: whose momentum moves, too.
        """
        updates: list[Tensor] = []
        for rule, alike in itertools.groupby(others, key=self._rule):
            rule(list(alike), wanted=False)
        for rule, alike in itertools.groupby(pieces, key=self._rule):
            updates += rule(list(alike), wanted=True)
        return updates

    def values(self, matrix: int) -> Tensor:
        """Return the momentum of a matrix, decoded."""
        return self._blocks[matrix].values() if matrix in self._blocks else self._buffers[matrix]

    def _rule(self, piece: Piece) -> Callable[..., list[Tensor]]:
        buffer = self._buffers[piece.matrix]
        if buffer.dtype is not torch.int8:
            return self._together
        return self._columns if piece.cuts_rows else self._quantized

    def _together(self, pieces: Sequence[Piece], *, wanted: bool) -> list[Tensor]:
        """Step buffers. The updates lie in memory one after the other, in the order of the pieces."""
        buffers = [piece.of(self._buffers[piece.matrix]) for piece in pieces]
        grads = [piece.of(self._grads[piece.matrix]) for piece in pieces]
        numbers = 1 - self._momentum, salt(self._step)
        if not wanted:
            over(MOVE_ALONE, [buffers, grads], *numbers)
            return []
        dtype = torch.promote_types(buffers[0].dtype, torch.float32)
        flat = torch.empty(sum(buffer.numel() for buffer in buffers), dtype=dtype, device=buffers[0].device)
        updates = shaped_like(flat, buffers)
        over(MOVE, [buffers, grads, updates], *numbers, into={1: 2}, nesterov=self._nesterov)
        return updates

    def _quantized(self, pieces: Sequence[Piece], *, wanted: bool) -> list[Tensor]:
        """Step int8 buffers, of which the pieces have whole rows, and so whole blocks; see `_together`.

        The memory of updates is needed for the gradients anyway, so that there are always some.
        """
        blocks = [self._blocks[piece.matrix] for piece in pieces]
        return self._moved(
            [piece.of(own.codes) for piece, own in zip(pieces, blocks, strict=True)],
            [piece.of(own.scales) for piece, own in zip(pieces, blocks, strict=True)],
            [piece.of(self._grads[piece.matrix]) for piece in pieces],
        )

    def _columns(self, pieces: Sequence[Piece], *, wanted: bool) -> list[Tensor]:
        """Step whole int8 parameters, since columns cut through blocks, and compute updates from what is stored."""
        updates = []
        for piece in pieces:
            blocks, grad = self._blocks[piece.matrix], self._grads[piece.matrix]
            if blocks.codes in self._unmoved:
                self._unmoved.remove(blocks.codes)
                self._moved([blocks.codes], [blocks.scales], [grad])
            if wanted:
                stored = blocks.values_of(piece)
                rate = 1 - self._momentum
                updates.append(_ahead(stored, piece.of(grad).float(), rate) if self._nesterov else stored)
        return updates

    def _moved(self, codes: Sequence[Tensor], scales: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Move int8 buffers towards gradients and return updates, which lie in memory one after the other."""
        flat = torch.empty(sum(own.numel() for own in codes), device=codes[0].device)
        updates = shaped_like(flat, codes)
        rows, row_scales = padded_rows(codes, BLOCK), padded_rows(scales, 1)
        has_gaps = any(not own.is_contiguous() for own in codes)
        if has_gaps and _are_stacks([*codes, *scales, *grads]) and not rows.has_padding:
            for own, own_scales, grad, update in zip(codes, scales, grads, updates, strict=True):  # without copies
                parts = [tensor.view(len(own), -1, BLOCK) for tensor in (own, grad, update)]
                arguments = [parts[0], own_scales.view(len(own), -1), *parts[1:]]
                MOVE_CODES(*arguments, 1 - self._momentum, nesterov=self._nesterov)
            return updates
        stored, stored_scales = rows.gathered(), row_scales.gathered()
        values = torch.zeros(stored.numel(), device=flat.device) if rows.has_padding else flat
        padded_rows(grads, BLOCK).gathered(into=values)
        both = values.view(-1, BLOCK)
        arguments = [stored.view(-1, BLOCK), stored_scales, both, both]
        MOVE_CODES(*arguments, 1 - self._momentum, nesterov=self._nesterov)
        rows.scatter(stored)
        row_scales.scatter(stored_scales)
        if rows.has_padding:
            padded_rows(updates, BLOCK).scatter(values)
        return updates
