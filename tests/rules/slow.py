"""Muon one matrix at a time in float64, by SVD, with a method for each point at which rules differ."""

from __future__ import annotations

import math

import torch

from hf_muon.math.coefficients import resolve
from tests.reference import newton_schulz_on_singular_values


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
        self.number = 0
        self.steps = resolve("polar_express", 5)

    def momentum_now(self):
        return self.momentum

    def weight_decay_now(self):
        return self.weight_decay

    def update(self, k, update):
        return update

    def direction(self, k, direction):
        return direction

    def decay(self, weight, direction):
        """Return what `lr * weight_decay` is multiplied by."""
        return weight

    def scale(self, weight):
        return 0.2 * math.sqrt(max(weight.shape))

    def step(self, grads):
        self.number += 1
        beta = self.momentum_now()
        for k, (weight, buffer, grad) in enumerate(zip(self.weights, self.buffers, grads, strict=True)):
            buffer.copy_(beta * buffer + (1 - beta) * grad.double())
            update = self.update(k, beta * buffer + (1 - beta) * grad.double())
            direction = self.direction(k, newton_schulz_on_singular_values(update, self.steps))
            decay = self.lr * self.weight_decay_now() * self.decay(weight, direction)
            weight.copy_(weight - decay - self.lr * self.scale(weight) * direction)
