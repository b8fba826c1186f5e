"""Parameters of Muon and AdamW groups, their gradients, small models, runs over them, and comparisons."""

from __future__ import annotations

import torch
from torch import nn

from hf_muon import Muon, build_optimizer

SHAPES = [(24, 24), (40, 16), (16, 40), (24, 24), (61, 7), (40, 16)]
# A bias, an embedding and a norm, for the AdamW group.
REST = [(40,), (100, 16), (16,)]
STEPS = 2


def parameters(shapes=SHAPES, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(shapes=SHAPES, steps=10, dtype=torch.float32, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(steps)]


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


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


def adamw_over(param, **options):
    return Muon([{"params": [param], "use_muon": False}], **options)


def build(dtype=torch.float32, **options):
    """Return a seeded model of two matrices and four vectors, and its optimizer before the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(18, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
    # By its place the last matrix would be a head.
    return model, build_optimizer(model, **{"lr": 0.01, "ns_dtype": "fp32", "muon_patterns": r"^\d\.weight", **options})


def step(optimizer, seed=0):
    """Take a step with seeded gradients of all parameters."""
    generator = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def stepped(dtype=torch.float32, **options):
    """Return a model and its optimizer after `STEPS` steps."""
    model, optimizer = build(dtype, **options)
    for k in range(STEPS):
        step(optimizer, k)
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


def bits(params):
    """Return the values of parameters, for `equal`."""
    return [param.detach() for param in params]
