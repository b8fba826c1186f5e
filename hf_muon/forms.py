"""How an orthogonalization is computed, from shapes alone: its form, its FLOPs, its memory.

With ``R = X X^T`` of ``s x s``, a Newton-Schulz step is ``X <- W X``, ``W = a I + b R + c R^2``. The *standard form*
makes ``R`` anew in every step. The *Gram form* goes several steps on small matrices alone, ``R <- W R W`` and
``Q <- W Q``, and then applies ``Q`` to ``X`` once. Such a run of steps is a *segment*; the standard form has segments
of one step.

Nothing here depends on how many matrices stand together, or on which rank: the same matrix takes the same way anywhere.

Source: Zhang, Amsel, Chen, Dao, Gram Newton-Schulz, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Steps on one Gram matrix. Each multiplies what rounding has put below zero by a^2, some 70 in the first step and 16 in
# the next ones, and far below zero the polynomial is far too large. A new Gram matrix has no such past. bf16 rounds so
# much that two steps already take singular values out of the band, by 0.1: it keeps the standard form.
_LONGEST = {torch.bfloat16: 1}
_LONGEST_OTHERWISE = 3
# Below this, matrices are too small for FLOPs to matter, and rounding averages out less in a product.
_LEAST = 64
# Rows of a symmetric product that are computed in one go. Fewer rows save more FLOPs, and are slower for each of them.
_ROWS = {("cpu", torch.float32): 256, ("cpu", torch.bfloat16): 1024}
_ROWS_OTHERWISE = 2048


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


def rows_at_once(size: int, dtype: torch.dtype, device_type: str) -> int:
    """Rows of a symmetric product ``(size, size)`` to compute in one go; `size` where parts of it would take longer."""
    rows = _ROWS.get((device_type, dtype), _ROWS_OTHERWISE)
    return rows if size >= 2 * rows else size


def flops(shape: Sequence[int], lengths: Sequence[int], rows: int | None = None) -> int:
    """Multiplications and additions in the products of an orthogonalization.

    Args:
        shape: of the matrix, ``(..., m, n)``.
        lengths: of its segments.
        rows: of a symmetric product that are computed in one go; None for all of them.
    """
    short, long = min(shape[-2:]), max(shape[-2:])
    rows = rows or short
    # Of the rows from `start` on, what stands left of the end of the block on the diagonal.
    entries = sum((min(start + rows, short) - start) * min(start + rows, short) for start in range(0, short, rows))
    total = 0
    for steps in lengths:
        # R; R^2 in each step, three more from one step to the next; Q X.
        total += 2 * entries * long + 2 * entries * short * (4 * steps - 3) + 2 * short * short * long
    return total


def described(shape: Sequence[int], steps: int, dtype: torch.dtype, device_type: str) -> str:
    """How a matrix is orthogonalized, in words."""
    lengths = segments(shape, steps, dtype)
    size = min(shape[-2:])
    form = "standard form" if max(lengths) == 1 else f"Gram form, {'+'.join(map(str, lengths))} steps"
    return form + (", symmetric products by half" if rows_at_once(size, dtype, device_type) < size else "")


def working_bytes(shape: Sequence[int], lengths: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that orthogonalizing one matrix takes, its direction among them."""
    short, long = min(shape[-2:]), max(shape[-2:])
    normalizing = short * long * (4 + (0 if dtype == torch.float32 else dtype.itemsize))
    iterating = (2 * short * long + small_matrices(lengths) * short * short) * dtype.itemsize
    return max(normalizing, iterating)


def small_matrices(lengths: Sequence[int]) -> int:
    """Matrices of ``s x s`` that are held at once."""
    return 2 if max(lengths) == 1 else 4
