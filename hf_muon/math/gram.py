"""Polynomials of a Gram matrix, and products that are known to be symmetric. Batches of ``(B, s, s)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.math.coefficients import Triple


def symmetric_(
    out: Tensor, a: Tensor, b: Tensor, *, add: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0, rows: int
) -> Tensor:
    """``out = beta * add + alpha * a @ b``, where that is symmetric: what is above the diagonal is copied.

    Args:
        out: ``(B, s, s)``; may be `add`, but neither `a` nor `b`.
        a: ``(B, s, l)``.
        b: ``(B, l, s)``.
        add: ``(B, s, s)``; nothing is added without it, and `alpha` is one.
        rows: how many are computed in one go, up to the end of their block on the diagonal.
    """
    size = out.size(-1)
    if rows >= size:
        return _product_(out, a, b, add, beta, alpha)
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        here = out[:, start:stop, :stop]
        addend = None if add is None else add[:, start:stop, :stop]
        _product_(here, a[:, start:stop], b[:, :, :stop], addend, beta, alpha)
        if start:
            out[:, :start, start:stop].copy_(out[:, start:stop, :start].mT)
    return out


def _product_(out: Tensor, a: Tensor, b: Tensor, add: Tensor | None, beta: float, alpha: float) -> Tensor:
    if add is None:
        return torch.bmm(a, b, out=out)
    return torch.baddbmm(add, a, b, beta=beta, alpha=alpha, out=out)


def polynomial_of_gram(
    gram: Tensor, shift: float, steps: Sequence[Triple], spare: Sequence[Tensor], rows: int
) -> tuple[float, Tensor]:
    """What some Newton-Schulz steps make of ``X``, from its Gram matrix ``R = X X^T``.

    Matrices are held without a multiple of the identity, which is kept as a number: on the diagonal it would take the
    bits that the rest of the matrix needs.

    Args:
        gram: ``R - shift * I``; is written to.
        shift: what was taken from the diagonal.
        steps: coefficients, at least one step.
        spare: one more matrix for a single step, three for several.
        rows: see `symmetric_`.

    Returns:
        ``q`` and ``P``, such that the steps take ``X`` to ``(q I + P) X``. ``P`` is one of the matrices given.
    """
    free = list(spare)
    scalar, product = 0.0, gram
    for k, (a, b, c) in enumerate(steps):
        w = a + shift * (b + shift * c)
        z = symmetric_(free.pop(), gram, gram, add=gram, beta=b + 2 * c * shift, alpha=c, rows=rows)  # W = w I + z
        if k == 0:
            scalar, product = w, z
        else:
            before = product
            scalar, product = _times(scalar, before, w, z, free.pop(), rows)
            free.append(before)
        if k + 1 < len(steps):
            between, half = _times(shift, gram, w, z, free.pop(), rows)
            shift, gram = _times(between, half, w, z, gram, rows)  # W R W
            free.append(half)
        if k:
            free.append(z)
    return scalar, product


def _times(scalar: float, matrix: Tensor, w: float, z: Tensor, out: Tensor, rows: int) -> tuple[float, Tensor]:
    """``(scalar I + matrix) (w I + z)``, of matrices that commute: the number and the rest, in `out`."""
    if scalar == 0:
        return 0.0, symmetric_(out, matrix, z, add=matrix, beta=w, rows=rows)
    # Both addends are rounded once, together.
    if abs(w) >= abs(scalar):
        torch.add(matrix, z, alpha=scalar / w, out=out)
        return scalar * w, symmetric_(out, matrix, z, add=out, beta=w, rows=rows)
    torch.add(z, matrix, alpha=w / scalar, out=out)
    return scalar * w, symmetric_(out, matrix, z, add=out, beta=scalar, rows=rows)
