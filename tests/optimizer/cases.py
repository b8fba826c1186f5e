"""Parameters of Muon and AdamW groups, their gradients, and runs over them."""

from __future__ import annotations

import torch
from torch import nn

from hf_muon import Muon

SHAPES = [(24, 24), (40, 16), (16, 40), (24, 24), (61, 7), (40, 16)]
# A bias, an embedding and a norm, for the AdamW group.
REST = [(40,), (100, 16), (16,)]


def parameters(shapes=SHAPES, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(shapes=SHAPES, steps=10, dtype=torch.float32, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(steps)]


def run(optimizer, params, all_grads):
    for grads in all_grads:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    return params


def both_halves(dtype=torch.float32, **options):
    matrices, rest = parameters(dtype=dtype), parameters(REST, dtype=dtype)
    optimizer = Muon([{"params": matrices}, {"params": rest, "use_muon": False}], **options)
    return optimizer, matrices + rest


def both_gradients(steps=6, dtype=torch.float32, seed=2):
    return gradients(SHAPES + REST, steps, dtype, seed)
