"""`balance`: rows of updates, or of directions, have equal norms.

Orthogonalization equalizes singular values. Rows of a tall direction can still have any norms, and keep them from step
to step: some neurons then hardly learn.

Sources: `updates`, MuonEq (R) of Chang et al., https://arxiv.org/abs/2603.28254. `directions`, Aurora of Dewulf et al.,
https://arxiv.org/abs/2606.27715, with the two passes and the exponent of the authors' code,
https://github.com/tilde-research/aurora-release.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_muon.options import types
from hf_muon.options.declaration import Option
from hf_muon.rules.rule import Options, Orthogonalize, Rule, States

# The dim that norms of rows, or of columns, sum over.
_ROWS, _COLUMNS = -1, -2
# A share of the mean norm. Rows below that, which gradients no longer reach, do not get a norm like the others'.
_LEAST_SHARE = 1e-3
# Matrices of zeros stay zero, and two inverses do not overflow.
_LEAST = 2.0**-60


def balanced(updates: Tensor, orthogonalize: Orthogonalize, state: States, options: Options, step: int) -> Tensor:
    """Return directions ``(B, out, in)``."""
    return (_of_balanced if options["balance"] == "updates" else _balanced)(_scaled(updates), orthogonalize)


def _of_balanced(updates: Tensor, orthogonalize: Orthogonalize) -> Tensor:
    """Return the directions of updates whose rows have been divided by their norms."""
    return orthogonalize(updates.div_(_norms(updates, _ROWS)))


def _balanced(updates: Tensor, orthogonalize: Orthogonalize) -> Tensor:
    """Return orthogonal directions whose rows have nearly equal norms; of wide matrices, columns.

    A diagonal matrix scales the longer dimension of an update. The norms of a first direction correct it: their
    squares to the power of 1/2.
    """
    out, columns = updates.shape[-2:]
    # The rows of a square orthogonal matrix have norm one already.
    if out == columns:
        return orthogonalize(updates)
    dim = _ROWS if out > columns else _COLUMNS
    # The Frobenius norm of an orthogonal matrix is sqrt(min(out, in)), here shared by max(out, in) rows or columns.
    wanted = (min(out, columns) / max(out, columns)) ** 0.5
    scale = _norms(updates, dim).reciprocal_()
    correction = wanted / _norms(orthogonalize(updates * scale), dim)
    return orthogonalize(updates.mul_(scale * correction))


def _scaled(updates: Tensor) -> Tensor:
    """Return each matrix times the power of two that makes its largest element about one, exactly, in new memory.

    Squares of very small or large elements would be zero or infinite.
    """
    largest = torch.linalg.vector_norm(updates, ord=float("inf"), dim=(-2, -1), keepdim=True)
    return torch.ldexp(updates, -torch.frexp(largest).exponent.clamp(-126, 126))


def _norms(matrices: Tensor, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=dim, keepdim=True)
    return norms.maximum(norms.mean(dim=(-2, -1), keepdim=True) * _LEAST_SHARE).clamp_min_(_LEAST)


RULE = Rule(
    name="balance",
    options={
        "balance": Option(
            types.choice(("none", "updates", "directions")),
            "none",
            "Give rows equal norms: `none`, `updates` (MuonEq) before orthogonalization, or `directions` (Aurora): it "
            "takes two orthogonalizations, and columns of wide matrices; square ones are as ever.",
            source="[2603.28254](https://arxiv.org/abs/2603.28254), [2606.27715](https://arxiv.org/abs/2606.27715)",
        )
    },
    is_on=lambda options: options["balance"] != "none",
    direction=balanced,
)
