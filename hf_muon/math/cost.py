"""How an orthogonalization is computed, from shapes alone: its form, its FLOPs, its memory.

With ``R = X X^T`` of ``s x s``, a Newton-Schulz step is ``X <- W X``, ``W = a I + b R + c R^2``. The *standard form*
makes ``R`` anew in every step. The *Gram form* goes several steps on small matrices alone, ``R <- W R W`` and
``Q <- W Q``, and then applies ``Q`` to ``X`` once. Such a run of steps is a *segment*; the standard form has segments
of one step.

Nothing here depends on how many matrices stand together, or on which rank: the same matrix takes the same way anywhere.

Source: Zhang, Amsel, Chen, Dao, Gram Newton-Schulz, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Steps on one Gram matrix. Each multiplies what rounding has put below zero by a^2, some 70 in the first step and 16 in
# the next ones, and far below zero the polynomial is far too large. A new Gram matrix has no such past. bf16 rounds so
# much that two steps already take singular values out of the band, by 0.1: it keeps the standard form.
_LONGEST = {torch.bfloat16: 1}
_LONGEST_OTHERWISE = 3
# Below this, matrices are too small for FLOPs to matter, and rounding averages out less in a product.
_LEAST = 64
# A symmetric product is computed about so many rows at a time, from the least size for which that is faster: fewer rows
# save more FLOPs, and are slower for each of them. Figures for fp32 are measured, the others are estimates.
_ROWS = {
    ("cpu", torch.float32): (384, (192, 128)),
    ("cpu", torch.bfloat16): (2048, (1024, 1024)),
}
_ROWS_OTHERWISE = (4096, (2048, 2048))
# With more of them, calls would be what takes time.
_MOST_BLOCKS = 12
# Blocks have a multiple of so many rows. Rows are longer than they need be by as many elements: those whose length is a
# power of two share few lines of a cache.
_VECTOR = 16


class Rows(NamedTuple):
    """How many rows of a symmetric product are computed in one go: of ``X X^T``, and of products of small matrices."""

    gram: int
    small: int


def segments(shape: Sequence[int], steps: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The lengths of the segments in which a matrix takes its steps.

    In units of ``s^3``, for sides ``s`` and ``alpha s``, a segment of ``n`` steps takes ``4 alpha + 8 n - 6`` FLOPs in
    the Gram form and ``n (4 alpha + 2)`` in the standard form: whatever ``n``, the Gram form is for matrices beyond
    ``alpha = 3/2``. bf16, which rounds more, has segments of one step.

    Args:
        shape: of the matrix, ``(..., m, n)``.
        steps: Newton-Schulz steps.
        dtype: of the products.
    """
    short, long = min(shape[-2:]), max(shape[-2:])
    gram = short >= _LEAST and 2 * long > 3 * short
    longest = _LONGEST.get(dtype, _LONGEST_OTHERWISE) if gram else 1
    whole, rest = divmod(steps, longest)
    return (longest,) * whole + (rest,) * bool(rest)


def rows_at_once(size: int, dtype: torch.dtype, device_type: str) -> Rows:
    """Rows of symmetric products ``(size, size)`` to compute in one go; `size` where parts of it would take longer.

    Compiled functions cannot write into a part of a matrix, and compute all of it.
    """
    least, rows = _ROWS.get((device_type, dtype), _ROWS_OTHERWISE)
    if size < least or torch.compiler.is_compiling():
        return Rows(size, size)
    blocks = (min(round(size / about), _MOST_BLOCKS) for about in rows)
    return Rows(*(math.ceil(size / number / _VECTOR) * _VECTOR for number in blocks))


def flops(shape: Sequence[int], lengths: Sequence[int], rows: Rows | None = None) -> int:
    """Multiplications and additions in the products of an orthogonalization.

    Args:
        shape: of the matrix, ``(..., m, n)``.
        lengths: of its segments.
        rows: of symmetric products that are computed in one go; None for all of them.
    """
    short, long = min(shape[-2:]), max(shape[-2:])
    rows = rows or Rows(short, short)
    total = 0
    for steps in lengths:
        # R; R^2 in each step, three more from one step to the next; Q X.
        total += 2 * _entries(short, rows.gram) * long + 2 * _entries(short, rows.small) * short * (4 * steps - 3)
        total += 2 * short * short * long
    return total


def _entries(size: int, rows: int) -> int:
    """Entries of a symmetric product that are computed: those left of the end of their block on the diagonal."""
    return sum((min(start + rows, size) - start) * min(start + rows, size) for start in range(0, size, rows))


def described(shape: Sequence[int], steps: int, dtype: torch.dtype, device_type: str) -> str:
    """How a matrix is orthogonalized, in words."""
    lengths = segments(shape, steps, dtype)
    size = min(shape[-2:])
    form = "standard form" if max(lengths) == 1 else f"Gram form, {'+'.join(map(str, lengths))} steps"
    return form + (", symmetric products by half" if rows_at_once(size, dtype, device_type).small < size else "")


def working_bytes(shape: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, rows: Rows) -> int:
    """Bytes that orthogonalizing one matrix takes, its direction among them."""
    short, long = min(shape[-2:]), max(shape[-2:])
    normalizing = short * long * (4 + (0 if dtype == torch.float32 else dtype.itemsize))
    iterating = (2 * short * long + small_matrices(lengths) * short * _row_length(short, rows)) * dtype.itemsize
    return max(normalizing, iterating)


def small_matrices(lengths: Sequence[int]) -> int:
    """Matrices of ``s x s`` that are held at once."""
    return 2 if max(lengths) == 1 else 4


def small_matrix(x: Tensor, size: int, rows: Rows) -> Tensor:
    """Memory for a matrix ``(B, size, size)`` beside each ``(B, m, n)`` of `x`."""
    return x.new_empty(x.size(0), size, _row_length(size, rows))[..., :size]


def _row_length(size: int, rows: Rows) -> int:
    return size + (_VECTOR if rows.small < size else 0)
