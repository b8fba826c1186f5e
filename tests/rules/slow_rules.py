"""Each rule as its paper writes it, on `SlowMuon`; by the names of `tests.rules.settings`."""

from __future__ import annotations

import torch

from tests.rules.slow import SlowMuon


class MomentumSchedule(SlowMuon):
    """modded-nanogpt's `get_muon_momentum`, with the numbers of the settings."""

    def momentum_now(self):
        step, warmup = self.number - 1, 2
        return 0.85 + step / warmup * (self.momentum - 0.85) if step < warmup else self.momentum


class NorMuon(SlowMuon):
    """Li et al., https://arxiv.org/abs/2510.05491, with the norm of the authors' code."""

    beta = 0.95

    def __init__(self, weights, **options):
        super().__init__(weights, **options)
        self.second = [torch.zeros(len(w), dtype=torch.float64) for w in self.weights]

    def direction(self, k, direction):
        rows = []
        for i, row in enumerate(direction):
            self.second[k][i] = self.beta * self.second[k][i] + (1 - self.beta) * (row * row).mean()
            rows.append(row / (self.second[k][i].sqrt() + 1e-10))
        normalized = torch.stack(rows)
        return normalized * direction.norm() / normalized.norm()


class Cautious(SlowMuon):
    """Chen et al., https://arxiv.org/abs/2510.12402."""

    def decay(self, weight, direction):
        return torch.where(weight * direction >= 0, weight, 0)

    def moved(self, k, weight, direction):
        self.unclear[k] |= direction.abs() < 1e-4 * direction.square().mean().sqrt()  # its sign may be another in fp32
        return super().moved(k, weight, direction)


SLOW = {"momentum_schedule": MomentumSchedule, "normalize": NorMuon, "cautious": Cautious}
