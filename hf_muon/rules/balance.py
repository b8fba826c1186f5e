"""`balance: updates`, MuonEq (R): each row of an update is divided by its norm before orthogonalization.

Orthogonalization equalizes singular values. Rows of a tall direction can still have any norms, and keep them from step
to step: some neurons then hardly learn. Source: Chang et al., https://arxiv.org/abs/2603.28254.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_muon.config import OPTIONS
from hf_muon.rules.rule import Options, Orthogonalize, Rule, States

# A share of the mean norm. Rows below that, which gradients no longer reach, do not get a norm like the others'.
_LEAST_SHARE = 1e-3
# Matrices of zeros stay zero.
_LEAST = 2.0**-60


def balanced(updates: Tensor, orthogonalize: Orthogonalize, state: States, options: Options, step: int) -> Tensor:
    """Return the directions ``(B, out, in)`` of updates whose rows have been divided by their norms."""
    # A power of two makes the largest element about one, exactly: squares of very small or large ones would be zero or
    # infinite.
    largest = torch.linalg.vector_norm(updates, ord=float("inf"), dim=(-2, -1), keepdim=True)
    scaled = torch.ldexp(updates, -torch.frexp(largest).exponent.clamp(-126, 126))
    norms: Tensor = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    least = norms.mean(dim=(-2, -1), keepdim=True) * _LEAST_SHARE
    return orthogonalize(scaled.div_(norms.maximum(least).clamp_min_(_LEAST)))


RULE = Rule(
    name="balance",
    options={"balance": OPTIONS["balance"]},
    is_on=lambda options: options["balance"] == "updates",
    direction=balanced,
)
