"""The Gram form: several Newton-Schulz steps on the Gram matrix ``R = X X^T``. Batches of ``(B, s, s)``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_muon.math.coefficients import Triple
from hf_muon.math.products import Workspace, symmetric_


def polynomial_of_gram(gram: Tensor, steps: Sequence[Triple], work: Workspace) -> Tensor:
    """Return ``Q``, such that the steps take ``X`` to ``Q X``, from the Gram matrix ``R = X X^T``.

    All of these matrices are polynomials of ``R``: symmetric, and their products commute.

    Args:
        gram: ``R``; is written to.
        steps: coefficients of at least two steps.
        work: whose memory is used, that of the next output included.
    """
    (product, free), scratch, rows = work.small, work.scratch(), work.rows.small
    between, weight = scratch, work.weight_(product, gram, steps[0])  # W = a I + b R + c R^2
    for step in steps[1:]:
        symmetric_(gram, symmetric_(between, gram, weight, rows=rows), weight, rows=rows)  # W R W
        weight = work.weight_(scratch, gram, step)
        product, free = symmetric_(free, product, weight, rows=rows), product  # W Q
        between = free
    return product
