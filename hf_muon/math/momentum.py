"""The momentum of matrices, and how it is stored between steps: fp32, bf16 with stochastic rounding, or int8 blocks.

A step always computes in fp32. How a value is rounded depends on the value, its block and the number of the step alone,
and blocks lie within the rows of a matrix. So every layout is bit-identical to a single process.

Everything that a dtype needs is in this file: state keys, dtypes, shapes, conversion, and the update itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hf_muon.math.rounding import rows_per_chunk, store_bf16_

MOMENTUM_DTYPES = ("auto", "fp32", "bf16", "int8")
BUFFER, SCALE = "momentum_buffer", "momentum_scale"
STATE_KEYS = (BUFFER, SCALE)
"""State keys that momentum may have; `state_keys` returns those of one parameter."""
BLOCK = 64
"""Elements of a row that share a scale."""
SHORTEST = 16
"""Rows shorter than this stay in fp32: their scales would weigh much, and such parameters are few."""
_LEVELS = 127


# --- how momentum is stored


def update_dtype(param: Tensor, momentum_dtype: str = "auto") -> torch.dtype:
    """Return the dtype in which a step computes updates.

    It is fp32 for bf16 and fp16 parameters too: bf16 has 8 significant bits, which would lose most of a gradient.
    """
    if momentum_dtype in ("auto", "fp32"):
        return torch.promote_types(param.dtype, torch.float32)
    return torch.float32


def buffer_dtype(param: Tensor, momentum_dtype: str = "auto", shape: Sequence[int] | None = None) -> torch.dtype:
    """Return the dtype of `momentum_buffer`.

    Args:
        param: the parameter.
        momentum_dtype: one of `MOMENTUM_DTYPES`.
        shape: shape of the whole parameter, if `param` is a shard.
    """
    if momentum_dtype == "bf16":
        return torch.bfloat16
    if is_quantized(momentum_dtype, param.shape if shape is None else shape):
        return torch.int8
    return update_dtype(param, momentum_dtype)


def is_quantized(momentum_dtype: str, shape: Sequence[int]) -> bool:
    """Return whether the momentum of a parameter of this shape is stored as int8."""
    return momentum_dtype == "int8" and len(shape) >= 2 and shape[-1] >= SHORTEST


def state_keys(momentum_dtype: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Return the state keys of the momentum of a parameter of this shape."""
    return (BUFFER, SCALE) if is_quantized(momentum_dtype, shape) else (BUFFER,)


def state_dtype(key: str, param: Tensor, momentum_dtype: str = "auto") -> torch.dtype:
    """Return the dtype of the state under one of `STATE_KEYS`."""
    return torch.float32 if key == SCALE else buffer_dtype(param, momentum_dtype)


def state_shape(key: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the state under one of `STATE_KEYS`, for a parameter or a shard of this shape."""
    return scale_shape(shape) if key == SCALE else tuple(shape)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of int8 momentum: ``(..., ceil(n / BLOCK))`` for ``(..., n)``."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def state_bytes(param: Tensor, momentum_dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of the momentum of a parameter, or of a shard of it of this shape."""
    nbytes = math.prod(shape) * buffer_dtype(param, momentum_dtype).itemsize
    return nbytes + 4 * math.prod(scale_shape(shape)) if is_quantized(momentum_dtype, param.shape) else nbytes


def stored_dtype(state: Mapping[str, Tensor]) -> str:
    """Return the `momentum_dtype` whose state keys a state needs: int8 if its buffer holds codes, else auto."""
    buffer = state.get(BUFFER)
    return "int8" if torch.is_tensor(buffer) and buffer.dtype is torch.int8 else "auto"


def decoded(state: Mapping[str, Tensor]) -> Tensor:
    """Return the values that a momentum state stands for: fp32 from int8 blocks, else the buffer itself."""
    if SCALE not in state:
        return state[BUFFER]
    blocks = Quantized(state[BUFFER].to(torch.int8), state[SCALE])
    return blocks.values() if blocks.codes.numel() else blocks.codes.float()


def encode_(state: Mapping[str, Tensor], values: Tensor) -> None:
    """Write values into a momentum state of their shape, rounded to nearest."""
    if SCALE not in state:
        state[BUFFER].copy_(values)
    elif values.numel():
        Quantized(state[BUFFER], state[SCALE]).store_(values.to(state[BUFFER].device, torch.float32))


# --- a step


class Cut(Protocol):
    """Some rows or columns of a stored tensor."""

    @property
    def dim(self) -> int: ...

    def of(self, stored: Tensor, /) -> Tensor: ...


class Piece(Protocol):
    """A part of what this rank stores of a matrix: some matrices of a stack, and of these some rows or columns."""

    @property
    def matrix(self) -> int: ...

    @property
    def local(self) -> slice | None: ...

    @property
    def cut(self) -> Cut | None: ...

    def of(self, local: Tensor, /) -> Tensor: ...


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
    """

    def __init__(
        self,
        state: Mapping[int, Mapping[str, Tensor]],
        grads: Mapping[int, Tensor],
        *,
        momentum: float,
        nesterov: bool,
        step: int = 0,
    ) -> None:
        self._buffers = {k: tensors[BUFFER] for k, tensors in state.items()}
        self._blocks = {
            k: Quantized(tensors[BUFFER], tensors[SCALE]) for k, tensors in state.items() if SCALE in tensors
        }
        self._grads = grads
        self._momentum = momentum
        self._nesterov = nesterov
        self._step = step
        self._unmoved = {blocks.codes for blocks in self._blocks.values()}

    def updates(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Move the momentum of some pieces and return their updates. Call it once for each piece of a step.

        Do not write to the updates: without `nesterov` they are the buffers themselves.
        """
        updates: list[Tensor] = []
        for rule, alike in itertools.groupby(pieces, key=self._rule):
            updates += rule(list(alike))
        return updates

    def values(self, matrix: int) -> Tensor:
        """Return the momentum of a matrix, decoded."""
        return self._blocks[matrix].values() if matrix in self._blocks else self._buffers[matrix]

    def _rule(self, piece: Piece) -> Callable[[Sequence[Piece]], list[Tensor]]:
        dtype = self._buffers[piece.matrix].dtype
        return {torch.bfloat16: self._rounded, torch.int8: self._quantized}.get(dtype, self._exact)

    def _exact(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Step buffers in the dtype of the step, all at once."""
        buffers = [piece.of(self._buffers[piece.matrix]) for piece in pieces]
        grads = [
            piece.of(self._grads[piece.matrix]).to(buffer.dtype) for piece, buffer in zip(pieces, buffers, strict=True)
        ]
        torch._foreach_lerp_(buffers, grads, 1 - self._momentum)
        return list(torch._foreach_lerp(grads, buffers, self._momentum)) if self._nesterov else buffers

    def _rounded(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Step bf16 buffers in fp32, which the updates are computed from, and round what is stored."""
        updates = []
        for piece in pieces:
            buffer, grad = piece.of(self._buffers[piece.matrix]), piece.of(self._grads[piece.matrix]).float()
            exact = buffer.float().lerp_(grad, 1 - self._momentum)
            store_bf16_(buffer, exact, self._step)
            updates.append(self._look_ahead(grad, exact))
        return updates

    def _quantized(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Step whole int8 parameters, since pieces may cut through blocks, and compute updates from what is stored."""
        updates = []
        for piece in pieces:
            blocks, grad = self._blocks[piece.matrix], self._grads[piece.matrix]
            if blocks.codes in self._unmoved:
                self._unmoved.remove(blocks.codes)
                blocks.move_(grad, self._momentum)
            updates.append(self._look_ahead(piece.of(grad).float(), blocks.values_of(piece)))
        return updates

    def _look_ahead(self, grad: Tensor, buffer: Tensor) -> Tensor:
        return grad.lerp(buffer, self._momentum) if self._nesterov else buffer


# --- int8 blocks


class Quantized(NamedTuple):
    """Momentum as int8 codes, and the largest absolute value of each block of a row.

    A code ``c`` in a block of scale ``s`` stands for ``sign(c) * (c / 127)**2 * s``: levels are denser near zero, where
    most momentum is. It takes exact arithmetic and square roots alone, which all hardware rounds alike.
    Block-wise scales: https://arxiv.org/abs/2110.02861; for Muon: https://arxiv.org/abs/2509.23106.

    Attributes:
        codes: ``(..., n)`` int8, contiguous.
        scales: ``(..., ceil(n / BLOCK))`` fp32, contiguous.
    """

    codes: Tensor
    scales: Tensor

    def values(self, part: slice | None = None) -> Tensor:
        """Return the fp32 values, or a slice of them along the first dim."""
        codes, scales = (self.codes, self.scales) if part is None else (self.codes[part], self.scales[part])
        n = codes.shape[-1]
        exact = codes.float()
        exact *= exact.abs()
        exact /= _LEVELS**2  # before the scale, so that the largest codes give exactly the scale
        values = _in_blocks(exact) * scales.unsqueeze(-1)
        return values.flatten(-2)[..., :n]

    def values_of(self, piece: Piece) -> Tensor:
        """Return the fp32 values of a piece."""
        if piece.cut is None or piece.cut.dim < self.codes.ndim - 1:
            return Quantized(piece.of(self.codes), piece.of(self.scales)).values()
        return piece.cut.of(self.values(piece.local))  # columns cut through blocks

    def store_(self, values: Tensor) -> None:
        """Store values ``(..., n)`` in fp32, each rounded to the nearest level."""
        n = values.shape[-1]
        blocks = _in_blocks(values)  # (..., blocks, width)
        scales = blocks.abs().amax(dim=-1)
        self.scales.copy_(scales)
        codes = blocks.abs()
        codes /= torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
        codes.sqrt_().mul_(_LEVELS).round_().copysign_(blocks)
        self.codes.copy_(codes.flatten(-2)[..., :n])

    def move_(self, grad: Tensor, momentum: float) -> None:
        """Move the average towards a gradient ``(..., n)``, in chunks of rows."""
        if not self.codes.numel():
            return
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (self.codes, self.scales, grad)]
        size = rows_per_chunk(self.codes, self.codes.shape[-1])
        for codes, scales, chunk in zip(*(torch.split(tensor, size) for tensor in rows), strict=True):
            blocks = Quantized(codes, scales)
            blocks.store_(blocks.values().lerp_(chunk.float(), 1 - momentum))


def _in_blocks(rows: Tensor) -> Tensor:
    """View ``(..., n)`` as ``(..., blocks, width)``, padded with zeros if the last block is not full."""
    width = min(BLOCK, rows.shape[-1])
    padded = F.pad(rows, (0, -rows.shape[-1] % width)) if rows.shape[-1] % width else rows
    return padded.reshape(*padded.shape[:-1], -1, width)
