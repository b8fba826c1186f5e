"""Muon one matrix at a time in float64, by SVD, with a method for each point at which rules differ."""

from __future__ import annotations

import math

import torch

from hf_muon.math.coefficients import resolve
from tests.reference import newton_schulz_on_singular_values


def relative(weights, slow, start):
    """Return the largest difference of a weight from a slow one, divided by how far that moved from its start."""
    worst = 0.0
    for weight, own, first, unclear in zip(weights, slow.weights, start, slow.unclear, strict=True):
        difference = (weight.detach().double() - own).masked_fill(unclear, 0)
        worst = max(worst, float(difference.norm() / (own - first.detach().double()).norm()))
    return worst


class SlowMuon:
    """A training of single matrices ``(out, in)`` with plain Muon; subclasses are rules.

    Args:
        weights: of the matrices.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: decay of the average of gradients.
    """

    def __init__(self, weights, lr, weight_decay, momentum=0.95):
        self.weights = [w.detach().double().clone() for w in weights]
        self.buffers = [torch.zeros_like(w) for w in self.weights]
        self.lr, self.weight_decay, self.momentum = lr, weight_decay, momentum
        self.unclear = [torch.zeros_like(w, dtype=torch.bool) for w in self.weights]  # elements that rounding decides
        self.rms, self.number = 0.2, 0
        self.steps = resolve("polar_express", 5)

    def momentum_now(self):
        return self.momentum

    def weight_decay_now(self):
        return self.weight_decay

    def rate_of(self, k):
        return self.lr

    def weight_decay_of(self, k):
        return self.weight_decay_now()

    def update(self, k, update):
        return update

    def orthogonalized(self, k, update):
        return newton_schulz_on_singular_values(update, self.steps)

    def direction(self, k, direction):
        return direction

    def decay(self, weight, direction):
        """Return what `lr * weight_decay` is multiplied by."""
        return weight

    def scale(self, k):
        return self.rms * math.sqrt(max(self.weights[k].shape))

    def moved(self, k, weight, direction):
        decay = self.rate_of(k) * self.weight_decay_of(k) * self.decay(weight, direction)
        return weight - decay - self.rate_of(k) * self.scale(k) * direction

    def step_of(self, k, grad):
        weight, buffer, beta = self.weights[k], self.buffers[k], self.momentum_now()
        buffer.copy_(beta * buffer + (1 - beta) * grad)
        update = self.update(k, beta * buffer + (1 - beta) * grad)
        weight.copy_(self.moved(k, weight, self.direction(k, self.orthogonalized(k, update))))

    def after_step(self):
        """Change whole weights."""

    def step(self, grads):
        self.number += 1
        self.before = [weight.clone() for weight in self.weights]
        for k, grad in enumerate(grads):
            self.step_of(k, grad.double())
        self.after_step()
