"""References for the package: the same mathematics, written as plainly as possible, at any cost in speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.math.coefficients import Steps


def polar_factor(matrix: Tensor) -> Tensor:
    """Return ``U V^T`` in float64, over the singular directions that are not numerically zero."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    nonzero = (s > s.amax(-1, keepdim=True) * 1e-10).double()
    return (u * nonzero.unsqueeze(-2)) @ vh


def normalized(matrix: Tensor) -> Tensor:
    """Return what the first step is applied to, in float64."""
    norm = matrix.double().norm(dim=(-2, -1), keepdim=True)
    return torch.where(norm > 0, matrix.double() / norm, matrix.double())


def newton_schulz_on_singular_values(matrix: Tensor, steps: Steps) -> Tensor:
    """Return the result of Newton-Schulz: apply the polynomials to the singular values of a float64 SVD."""
    u, s, vh = torch.linalg.svd(normalized(matrix), full_matrices=False)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ vh


class ReferenceMuon:
    """Muon one matrix at a time, in float64, by SVD. `params` holds the weights after each step."""

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        steps: Steps,
        adjust_lr_fn: str,
        update_rms: float = 0.2,
    ) -> None:
        self.params = [p.detach().double().clone() for p in params]
        self.buffers = [torch.zeros_like(p) for p in self.params]
        self.lr, self.weight_decay, self.momentum, self.nesterov = lr, weight_decay, momentum, nesterov
        self.steps, self.adjust_lr_fn, self.update_rms = steps, adjust_lr_fn, update_rms

    def step(self, grads: Sequence[Tensor]) -> None:
        for p, buffer, grad in zip(self.params, self.buffers, grads, strict=True):
            g = grad.double()
            buffer.copy_(self.momentum * buffer + (1 - self.momentum) * g)
            update = self.momentum * buffer + (1 - self.momentum) * g if self.nesterov else buffer
            rows, columns = p.shape[-2:]
            scale = {
                "match_rms_adamw": self.update_rms * math.sqrt(max(rows, columns)),
                "original": math.sqrt(max(1, rows / columns)),
                "spectral_unclamped": math.sqrt(rows / columns),
            }[self.adjust_lr_fn]
            direction = newton_schulz_on_singular_values(update, self.steps)
            p.copy_(p - self.lr * self.weight_decay * p - self.lr * scale * direction)


def moved(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the distance between two sets of weights."""
    pairs = zip(before, after, strict=True)
    return math.sqrt(sum(float((a.detach().double() - b.detach().double()).square().sum()) for a, b in pairs))


def relative_difference(start: Sequence[Tensor], one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the distance between two results, divided by the distance of `other` from `start`."""
    return moved(one, other) / moved(start, other)
