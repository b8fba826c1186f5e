"""How a matrix is orthogonalized, from its shape and dtype: the form, its FLOPs, its memory.

With the Gram matrix ``R = X X^T`` of ``s x s``, a Newton-Schulz step is ``X <- W X``, ``W = a I + b R + c R^2``. The
*standard form* computes a new ``R`` in every step. The *Gram form* takes several steps on only small matrices,
``R <- W R W`` and ``Q <- W Q``, and then multiplies ``X`` by ``Q`` once. Such a group of steps is a *segment*; the
standard form has segments of one step.

The form does not depend on the batch size or the rank, so a matrix is always computed in the same way.

Source: Zhang, Amsel, Chen, Dao, Gram Newton-Schulz, https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

# The longest segment. Rounding makes some eigenvalues of R slightly negative; each step amplifies them by about a^2
# (70, then 16) until the polynomial diverges. Recomputing R = X X^T resets them. bf16 rounds so much that two steps
# already move singular values out of the range of the preset, by 0.1: it keeps the standard form.
_LONGEST_SEGMENT = {torch.bfloat16: 1}
_LONGEST_SEGMENT_OF_OTHERS = 3
# Smaller matrices keep the standard form: FLOPs matter little, and rounding errors average out less in short products.
# In fp16, updates of 64 rows leave the range of the preset; benchmarks/findings.md has the figures.
_SMALLEST_GRAM = {torch.float16: 256}
_SMALLEST_GRAM_OF_OTHERS = 64
# For symmetric products on a CPU: the smallest size for which blocks of rows are faster, and the most rows of a block,
# for X X^T and for products of small matrices. Fewer rows save more FLOPs, and each FLOP is slower. The figures for
# fp32 and bf16 are measured, the others are estimates. Accelerators have one block: more launches, in which each block
# fills the device less, and nobody has measured what they save.
_BLOCK_ROWS = {
    torch.float32: (256, (208, 128)),
    torch.bfloat16: (512, (256, 256)),
}
_BLOCK_ROWS_OF_OTHERS = (4096, (2048, 2048))
# More blocks would spend their time in calls.
_MAX_BLOCKS = 12
# Blocks have a multiple of 16 rows, and rows are padded by 16 elements: power-of-two strides cause cache-set conflicts.
_VECTOR = 16
# What is worked on at a time, bytes: on a CPU, what stays in its caches.
_MOST_BYTES = {"cpu": 6 * 2**20}


class Form(NamedTuple):
    """How a matrix is orthogonalized.

    Attributes:
        lengths: steps of each segment, in order.
        gram: rows of a block in the symmetric product ``X X^T``.
        small: rows of a block in symmetric products of small matrices.
    """

    lengths: tuple[int, ...]
    gram: int
    small: int


def form(shape: Sequence[int], steps: int, dtype: torch.dtype, device_type: str | None = None) -> Form:
    """Return how a matrix takes its steps.

    In units of ``s^3``, for a matrix ``s x alpha s``, a segment of ``n`` steps takes ``4 alpha + 8 n - 6`` FLOPs in
    the Gram form and ``n (4 alpha + 2)`` in the standard form. For any ``n`` the Gram form is cheaper from
    ``alpha = 3/2`` on. bf16, which rounds more, has segments of one step.

    Args:
        shape: shape of the matrix, ``(..., m, n)``.
        steps: number of Newton-Schulz steps.
        dtype: dtype of the products.
        device_type: where it does so; None for an accelerator.
    """
    short, long = min(shape[-2:]), max(shape[-2:])
    gram = short >= _SMALLEST_GRAM.get(dtype, _SMALLEST_GRAM_OF_OTHERS) and 2 * long > 3 * short
    longest = _LONGEST_SEGMENT.get(dtype, _LONGEST_SEGMENT_OF_OTHERS) if gram else 1
    count, rest = divmod(steps, longest)
    lengths = (longest,) * count + (rest,) * bool(rest)
    smallest, rows = _BLOCK_ROWS.get(dtype, _BLOCK_ROWS_OF_OTHERS)
    # Compiled functions have one block, because they cannot write into a part of a matrix.
    if device_type != "cpu" or short < smallest or torch.compiler.is_compiling():
        return Form(lengths, short, short)
    blocks = (min(math.ceil(short / most), _MAX_BLOCKS) for most in rows)
    return Form(lengths, *(math.ceil(short / number / _VECTOR) * _VECTOR for number in blocks))


def flops(shape: Sequence[int], form: Form) -> int:
    """Return the multiplications and additions in the products of an orthogonalization ``(..., m, n)``."""
    short, long = min(shape[-2:]), max(shape[-2:])
    total = 0
    for steps in form.lengths:
        # R; R^2 in each step, three more from one step to the next; Q X.
        total += 2 * _entries(short, form.gram) * long + 2 * _entries(short, form.small) * short * (4 * steps - 3)
        total += 2 * short * short * long
    return total


def _entries(size: int, rows: int) -> int:
    """Return how many entries of a symmetric product are computed: in each block, those up to its diagonal end."""
    return sum((min(start + rows, size) - start) * min(start + rows, size) for start in range(0, size, rows))


def working_bytes(shape: Sequence[int], form: Form, dtype: torch.dtype) -> int:
    """Return the bytes that orthogonalizing one matrix ``(..., m, n)`` takes.

    These are allocated, its direction included. Where an fp32 matrix is overwritten, they include its own.
    """
    short, long = min(shape[-2:]), max(shape[-2:])
    normalizing = short * long * (4 + (0 if dtype == torch.float32 else dtype.itemsize))
    small = small_matrices(form) * short * row_length(short, form)
    return max(normalizing, (2 * short * long + small) * dtype.itemsize)


def batch_size(shape: Sequence[int], form: Form, dtype: torch.dtype, device_type: str, max_batch_bytes: int) -> int:
    """Return how many matrices are orthogonalized together.

    Products round differently in batches of other sizes. So this depends neither on who holds the matrices nor on
    whether they are overwritten.

    Args:
        shape: the shape of one of them, ``(..., m, n)``.
        form: how it is orthogonalized.
        dtype: dtype of the products.
        device_type: where it is done.
        max_batch_bytes: bound on the `working_bytes` of all of them, unless there is only one.
    """
    if not torch.compiler.is_compiling():  # compiled functions cannot write into a part of a batch
        max_batch_bytes = min(max_batch_bytes, _MOST_BYTES.get(device_type, max_batch_bytes))
    return max(1, max_batch_bytes // working_bytes(shape, form, dtype))


def small_matrices(form: Form) -> int:
    """Return how many matrices of ``s x s`` the segments need at once, in addition to one in the output's memory."""
    return 2 if max(form.lengths) == 1 else 3


def row_length(size: int, form: Form) -> int:
    """Return the stride between rows of a matrix ``s x s``, in elements."""
    return size + (_VECTOR if form.small < size else 0)
