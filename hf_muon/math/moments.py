"""How moments are stored between steps: fp32, bf16 with stochastic rounding, or 8-bit codes with scales.

This module has everything about a dtype: state keys, dtypes, shapes, and how elementwise functions read and write.

In 8 bits a moment is a code for each element, and a scale for each block of a row. Blocks lie within the rows of a
matrix, and codes do not depend on the position of a block. CPUs and GPUs may give different codes, because torch's
square root on a CPU may be off by a unit in the last place. Block-wise scales: https://arxiv.org/abs/2110.02861; for
Muon: https://arxiv.org/abs/2509.23106.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hf_muon.math.elementwise import Elementwise, chunk_size, over, rows_per_chunk
from hf_muon.math.rounding import Salt, salted_bf16, salted_bits

MOMENT_DTYPES = ("auto", "fp32", "bf16", "int8")

BLOCK = 64
"""Elements of a row that share a scale."""
SHORTEST = 16
"""Rows shorter than this stay in fp32: their scales would weigh much, and such parameters are few."""


class Moment(NamedTuple):
    """How a moment is stored. In 8 bits a code ``c`` is ``sign(c) * (abs(c) / largest)**power``, times a scale.

    Levels are denser near zero. The scale is the largest absolute value of the block.

    Attributes:
        scale: state key of the scales.
        dtype: the dtype of the codes.
        largest: the largest code.
        power: 2 or 4.
    """

    scale: str
    dtype: torch.dtype
    largest: int
    power: int

    def fractions(self, codes: Tensor) -> Tensor:
        """Return the fractions, from -1 to 1, that codes represent, in fp32."""
        exact = codes.float()
        exact = exact * exact.abs()
        # A product, as compilers write it; 1 for the largest code, which gives the scale.
        exact *= 1 / self.largest**2
        return exact.mul_(exact) if self.power == 4 else exact

    def codes_of(self, blocks: Tensor, salt: Salt | None = None) -> tuple[Tensor, Tensor]:
        """Return the codes of blocks ``(..., width)``, as fp32 numbers, and their scales ``(..., 1)``.

        Args:
            blocks: fp32 and finite.
            salt: the salt of the step, see `rounding.salted_bits`, to round up or down at random, so that the mean is
                the value; None to round to the nearest level.
        """
        fractions = blocks.abs()
        scales = fractions.amax(dim=-1, keepdim=True)
        fractions = fractions / torch.where(scales > 0, scales, 1.0)
        roots = fractions.clone().sqrt_()
        codes = (roots.sqrt_() if self.power == 4 else roots).mul_(self.largest)
        if salt is None:
            codes = codes.round()
        else:
            below = codes.floor().clamp(max=self.largest - 1)
            low, high = self.fractions(below), self.fractions(below + 1)
            # 24 bits, which fp32 holds exactly: a draw is a multiple of 2**-24 below one, never one.
            draws = (salted_bits(blocks, salt) & 0xFFFFFF).float() * 2.0**-24
            codes = below + (draws * (high - low) < fractions - low)
        if self.dtype.is_signed:
            return codes.copysign(blocks), scales
        # Not zero where the value is not: AdamW divides by its root, and would take a huge step.
        return codes.maximum((fractions > 0).to(codes.dtype)), scales

    def read(self, stored: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the values of a stored moment: the tensor itself, or those of blocks of codes, in fp32.

        Args:
            stored: the moment; with scales ``(...)`` the codes ``(..., BLOCK)``.
            scales: the scales of codes.
        """
        if scales is None:
            return stored
        # For a compiler, which would give rows of unknown length memory for their results.
        torch._check(stored.shape[-1] == BLOCK)  # type: ignore[no-untyped-call]
        return self.fractions(stored) * scales.unsqueeze(-1)

    def write_(self, values: Tensor, salt: Salt | None, stored: Tensor, scales: Tensor | None = None) -> None:
        """Store values that a step has computed; the opposite of `read`.

        Args:
            values: a tensor of the shape of `stored`, in at least 32 bits.
            salt: the salt of the step, to round to bf16 and codes at random; codes are the nearest without it.
            stored: where to store them; may be `values`.
            scales: where to store the scales of codes.
        """
        if scales is not None:
            codes, largest = self.codes_of(values.float(), salt)
            stored.copy_(codes)
            scales.copy_(largest.squeeze(-1))
        elif stored.dtype is torch.bfloat16:
            assert salt is not None
            stored.copy_(salted_bf16(values.float(), salt))
        else:
            stored.copy_(values)


MOMENTS = {
    # Averages of gradients have a sign, and most lie near zero.
    "momentum_buffer": Moment("momentum_scale", torch.int8, 127, 2),
    "exp_avg": Moment("exp_avg_scale", torch.int8, 127, 2),
    # Those of squared gradients lie over nine orders of magnitude; their square roots are as dense as the others.
    "exp_avg_sq": Moment("exp_avg_sq_scale", torch.uint8, 255, 4),
}
"""By state key."""
SCALES = {moment.scale: key for key, moment in MOMENTS.items()}
"""State keys of scales, with those of their moments."""


def over_blocks(function: Elementwise, columns: Sequence[Sequence[Tensor]], *numbers: float, **options: Any) -> None:
    """Call a function of blocks on many tensors, as `over` does.

    Where rows do not end with a block, it gets copies of them that are filled up with zeros, few at a time.

    Args:
        function: takes rows ``(R, BLOCK)``, and scales ``(R,)`` where its `by_row` says so.
        columns: as in `over`.
        numbers: further arguments of the function.
        options: its options.
    """
    rows = [*zip(*columns, strict=True)]
    chunks: list[Sequence[Tensor]] = []
    for row in rows:
        if row[0].shape[-1] % BLOCK:
            chunks += zip(*(torch.split(tensor.detach(), rows_per_chunk(row[0])) for tensor in row), strict=True)
    if not chunks:
        over(function, columns, *numbers, **options)
        return
    if whole := [row for row in rows if row[0].shape[-1] % BLOCK == 0]:
        over(function, [*zip(*whole, strict=True)], *numbers, **options)
    size = chunk_size(rows[0][0].device)
    # A turn takes as many elements as one chunk of the device.
    totals = itertools.accumulate(chunk[0].numel() for chunk in chunks)
    kinds = [
        (total // size, chunk[0].device, *(tensor.dtype for tensor in chunk))
        for total, chunk in zip(totals, chunks, strict=True)
    ]
    for _, members in itertools.groupby(range(len(chunks)), key=kinds.__getitem__):
        turn = [*zip(*(chunks[k] for k in members), strict=True)]
        kept = {*function.by_row, *function.scratch_of}
        copies = [column if c in kept else _zeros(column) for c, column in enumerate(turn)]
        for c, other in function.scratch_of.items():
            copies[c] = copies[other]
        places = [
            [copy[..., : t.shape[-1]] for copy, t in zip(*each, strict=True)] for each in zip(copies, turn, strict=True)
        ]
        for c in function.reads:
            if c not in function.by_row:
                torch._foreach_copy_(places[c], turn[c])
        over(function, copies, *numbers, **options)
        for c in function.writes:
            torch._foreach_copy_(turn[c], places[c])


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of codes: ``(..., ceil(n / BLOCK))`` for ``(..., n)``."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def is_quantized(dtype: str, shape: Sequence[int]) -> bool:
    """Return whether the moments of a parameter of this shape are stored as codes.

    Args:
        dtype: one of `MOMENT_DTYPES`.
        shape: the shape of the whole parameter.
    """
    return dtype == "int8" and len(shape) >= 2 and shape[-1] >= SHORTEST


def with_scales(keys: Sequence[str], dtype: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Return state keys of a parameter of this shape, each moment with that of its scales where it has any."""
    if not is_quantized(dtype, shape):
        return tuple(keys)
    return tuple(name for key in keys for name in ((key, MOMENTS[key].scale) if key in MOMENTS else (key,)))


def moment_dtype(param: Tensor, key: str, dtype: str = "auto", shape: Sequence[int] | None = None) -> torch.dtype:
    """Return the dtype of the state under a key of `MOMENTS` or `SCALES`.

    It is fp32 for bf16 and fp16 parameters too: bf16 has 8 significant bits, which would lose most of a gradient, and
    with which AdamW's second moment, rounded to nearest, stops at a third of its value.

    Args:
        param: the parameter.
        key: the key of the state.
        dtype: one of `MOMENT_DTYPES`.
        shape: the shape of the whole parameter, if `param` is a shard.
    """
    if key in SCALES:
        return torch.float32
    if is_quantized(dtype, param.shape if shape is None else shape):
        return MOMENTS[key].dtype
    if dtype == "bf16":
        return torch.bfloat16
    return torch.float32 if dtype == "int8" else torch.promote_types(param.dtype, torch.float32)


def state_shape(key: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the state under a key, for a parameter or a shard of this shape."""
    return scale_shape(shape) if key in SCALES else tuple(shape)


def lacks_scales(state: Mapping[str, Tensor], key: str) -> bool:
    """Return whether a moment consists of codes, and their scales are missing."""
    stored = state.get(key)
    is_code = torch.is_tensor(stored) and not stored.dtype.is_floating_point
    return is_code and MOMENTS[key].scale not in state


def decoded(state: Mapping[str, Tensor], key: str) -> Tensor:
    """Return the values of a moment: fp32 decoded from codes, else the stored tensor itself."""
    moment, stored = MOMENTS[key], state[key]
    if moment.scale not in state:
        return stored
    if not stored.numel():
        return stored.float()
    return moment.read(_in_blocks(stored), state[moment.scale]).flatten(-2)[..., : stored.shape[-1]]


def decoded_chunks(state: Mapping[str, Tensor], keys: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield the values of moments with equal shapes: those of codes in chunks of rows, which limits memory."""
    if not any(MOMENTS[key].scale in state for key in keys):
        yield {key: state[key] for key in keys}
        return
    tensors = {name: state[name] for key in keys for name in (key, MOMENTS[key].scale)}
    rows = rows_per_chunk(state[keys[0]])
    for values in zip(*(torch.split(tensor, rows) for tensor in tensors.values()), strict=True):
        chunk = dict(zip(tensors, values, strict=True))
        yield {key: decoded(chunk, key) for key in keys}


def encode_(state: Mapping[str, Tensor], key: str, values: Tensor) -> None:
    """Write values into a moment of their shape, rounded to nearest."""
    moment, stored = MOMENTS[key], state[key]
    if moment.scale not in state:
        stored.copy_(values)
    elif values.numel():
        codes, scales = moment.codes_of(_in_blocks(values.to(stored.device, torch.float32)))
        stored.copy_(codes.flatten(-2)[..., : stored.shape[-1]])
        state[moment.scale].copy_(scales.squeeze(-1))


def _in_blocks(rows: Tensor) -> Tensor:
    """View ``(..., n)`` as ``(..., blocks, BLOCK)``, padded with zeros if the last block is not full."""
    padded = F.pad(rows, (0, -rows.shape[-1] % BLOCK)) if rows.shape[-1] % BLOCK else rows
    return padded.reshape(*padded.shape[:-1], -1, BLOCK)


def _zeros(column: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return zeros for tensors of one dtype, with rows as long as a multiple of `BLOCK`, one after the other."""
    shapes = [(*tensor.shape[:-1], -(-tensor.shape[-1] // BLOCK) * BLOCK) for tensor in column]
    sizes = [math.prod(shape) for shape in shapes]
    flats = torch.split(column[0].new_zeros(sum(sizes)), sizes)
    return [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]
