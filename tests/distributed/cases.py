"""Parameters stored in a layout and stepped with given gradients; pools import these functions by name."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from hf_muon import Muon
from hf_muon.optimizer.step_plan import StepPlan
from tests.equality.cells import MATRICES as SHAPES
from tests.equality.cells import VECTORS
from tests.equality.placed import placements_of, stored, whole

PLAIN = tuple((shape, "") for shape in SHAPES)


def make(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def placed(tensors, layout):
    """Return the function that stores a tensor in a layout, and the parameters of these tensors in it."""
    if layout in ("single", "ddp"):
        return torch.clone, [nn.Parameter(tensor) for tensor in tensors]
    mesh = init_device_mesh(tensors[0].device.type, placements_of(layout, 2)[0])

    def put(tensor):
        return stored(tensor, mesh, placements_of(layout, tensor.ndim)[1])

    return put, [nn.Parameter(put(tensor)) for tensor in tensors]


def muon_over(params, count, layout, views=None, **options):
    """Return the optimizer of `count` matrices, and of what follows them, which AdamW steps."""
    named = [(f"weight {i}", param) for i, param in enumerate(params)]
    groups = [
        {"params": named[:count], "use_muon": True, "weight_decay": 0.1, **({"views": views} if views else {})},
        {"params": named[count:], "use_muon": False},
    ]
    if layout == "ddp":
        options["replicate_group"] = dist.group.WORLD
    return Muon([group for group in groups if group["params"]], lr=0.02, **{"ns_dtype": "fp32", **options})


def given_gradients(rank, layout, steps=4, dtype="float32", device="cpu", viewed=PLAIN, tables=(), **options):
    """Return whole parameters and moments after steps with given whole gradients.

    `viewed` are shapes and views of matrices, and `tables` shapes of those that AdamW steps, as embeddings.
    """
    viewed, dtype = list(viewed), getattr(torch, dtype)
    shapes = [*(shape for shape, _ in viewed), *VECTORS, *tables]
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share one
    put, params = placed([weight.to(device) for weight in make(shapes, 0, dtype)], layout)
    ns_dtype = "bf16" if dtype is torch.bfloat16 else "fp32"
    views = [view for _, view in viewed]
    optimizer = muon_over(params, len(viewed), layout, views, **{"ns_dtype": ns_dtype, **options})
    for step in range(steps):
        for param, grad in zip(params, make(shapes, step + 1, dtype), strict=True):
            param.grad = put(grad.to(device))
        optimizer.step()
    return whole_state(params, optimizer)


def given_gradients_prepared_alone(rank, layout):
    """Do what `given_gradients` does, where an error ends a preparation that sends something."""
    gradients = StepPlan.gradients

    def alone(*args, **options):
        with Silent():
            return gradients(*args, **options)

    with mock.patch.object(StepPlan, "gradients", alone):
        return given_gradients(rank, layout, normalize="rows")


class Silent(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.namespace not in ("c10d", "_c10d_functional"), f"{function} sends something"
        return function(*args, **(kwargs or {}))


def whole_state(params, optimizer):
    """Return parameters and every tensor of their state as full tensors."""
    return [[whole(p), *(whole(v) for _, v in sorted(optimizer.state[p].items()))] for p in params]


def assert_equal(results, expected):
    """Compare the state of each rank with that of one process, bit by bit."""
    for rank, result in enumerate(results):
        for i, (mine, single) in enumerate(zip(result, expected, strict=True)):
            for tensor, reference in zip(mine, single, strict=True):
                assert tensor.dtype == reference.dtype
                assert torch.equal(tensor, reference), f"rank {rank}, parameter {i}: {(tensor - reference).abs().max()}"
