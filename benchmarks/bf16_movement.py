"""Measure how much of the movement of fp32 weights bf16 weights make: 100 steps, printed as a table."""

from __future__ import annotations

import torch
from torch import nn

from hf_muon import Muon

SHAPE, STEPS, DEVIATION = (256, 256), 100, 0.02
RATES = (1e-5, 2e-5, 2e-4, 2e-3)
SIDES = {
    "Muon, nearest": {"weight_rounding": "nearest"},
    "Muon, stochastic": {"weight_rounding": "stochastic"},
    "AdamW half, nearest": {"use_muon": False, "weight_rounding": "nearest"},
    "AdamW half, stochastic": {"use_muon": False, "weight_rounding": "stochastic"},
    "torch's AdamW in bf16": None,
}


def gradients() -> list[torch.Tensor]:
    """Return gradients that have most of their direction in common."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(SHAPE, generator=generator)
    return [common + 0.3 * torch.randn(SHAPE, generator=generator) for _ in range(STEPS)]


def movement(lr: float, dtype: torch.dtype, options: dict[str, object] | None) -> torch.Tensor:
    """Return how far the weights move, in fp32."""
    weight = nn.Parameter((DEVIATION * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))).to(dtype))
    start = weight.detach().float().clone()
    if options is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.0)
    else:
        optimizer = Muon([{"params": [weight], **options}], lr=lr)
    for grad in gradients():
        weight.grad = grad.to(dtype)
        optimizer.step()
    return weight.detach().float() - start


def main() -> None:
    """Print the movement of bf16 weights along that of fp32 weights, as a fraction of it."""
    torch.set_num_threads(1)
    print("| learning rate |", " | ".join(SIDES), "|")
    print("| --- " * (len(SIDES) + 1) + "|")
    for lr in RATES:
        cells = []
        for options in SIDES.values():
            exact, rounded = (movement(lr, dtype, options) for dtype in (torch.float32, torch.bfloat16))
            cells.append(f"{float((exact * rounded).sum() / exact.square().sum()):.3f}")
        print(f"| {lr:g} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
