"""The Gram form: several Newton-Schulz steps on the Gram matrix ``R = X X^T``. Batches of ``(B, s, s)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.math.coefficients import Triple
from hf_muon.math.products import symmetric_


def polynomial_of_gram(
    gram: Tensor, shift: float, steps: Sequence[Triple], workspace: Sequence[Tensor], rows: int
) -> tuple[float, Tensor]:
    """Return ``q`` and ``P``, such that the steps take ``X`` to ``(q I + P) X``, from the Gram matrix ``R = X X^T``.

    Multiples of the identity are kept apart, as numbers: on the diagonal they would cost significant bits of the rest.

    Args:
        gram: ``R - shift * I``; is written to.
        shift: what was subtracted from the diagonal.
        steps: coefficients of at least one step.
        workspace: one more matrix for a single step, three for several. ``P`` is one of them, or `gram`.
        rows: see `symmetric_`.
    """
    free = list(workspace)
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
    """Multiply ``scalar I + matrix`` by ``w I + z``, which commute: return the number, and the rest in `out`."""
    if scalar == 0:
        return 0.0, symmetric_(out, matrix, z, add=matrix, beta=w, rows=rows)
    # The sum of both addends is rounded once.
    if abs(w) >= abs(scalar):
        torch.add(matrix, z, alpha=scalar / w, out=out)
        return scalar * w, symmetric_(out, matrix, z, add=out, beta=w, rows=rows)
    torch.add(z, matrix, alpha=w / scalar, out=out)
    return scalar * w, symmetric_(out, matrix, z, add=out, beta=scalar, rows=rows)
