"""A small run of a Muon, and the comparison of state dicts."""

from __future__ import annotations

import torch
from torch import nn

from hf_muon import build_optimizer

STEPS = 2


def net(dtype=torch.float32):
    """Return a seeded model of two matrices and four vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(18, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def build(dtype=torch.float32, **options):
    """Return a model and its optimizer before the first step."""
    model = net(dtype)
    return model, build_optimizer(model, {"lr": 0.01, "ns_dtype": "fp32", **options})


def step(model, optimizer, seed=0):
    """Take a step with seeded gradients."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def stepped(dtype=torch.float32, **options):
    """Return a model and its optimizer after `STEPS` steps."""
    model, optimizer = build(dtype, **options)
    for k in range(STEPS):
        step(model, optimizer, k)
    return model, optimizer


def equal(one, other):
    """Return whether two state dicts, or parts of them, are equal, types included."""
    if isinstance(one, torch.Tensor):
        same_kind = isinstance(other, torch.Tensor) and (one.dtype, one.layout) == (other.dtype, other.layout)
        return same_kind and ((one.is_meta and other.is_meta) or torch.equal(one.to_dense(), other.to_dense()))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
