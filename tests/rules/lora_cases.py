"""Pairs of LoRA factors and plain matrices, stored in every layout, stepped by the ranks of a pool."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hf_muon import Muon
from tests.distributed.cases import make, placements_of, store, whole_state
from tests.distributed.stand_in_cases import on_device

# (out, rank, in); pairs of equal shapes share a unit.
PAIRS = [(12, 3, 20), (12, 3, 20), (9, 4, 7), (5, 2, 30), (7, 4, 9)]
PLAIN = [(10, 14), (12, 3)]


def named(pairs=tuple(PAIRS), plain=tuple(PLAIN)):
    """Return the names and shapes of the factors of pairs, lora_A first, and of plain matrices."""
    shapes = {}
    for k, (rows, rank, columns) in enumerate(pairs):
        shapes[f"layers.{k}.lora_A.default.weight"] = (rank, columns)
        shapes[f"layers.{k}.lora_B.default.weight"] = (rows, rank)
    return {**shapes, **{f"plain.{k}.weight": shape for k, shape in enumerate(plain)}}


def weights_of(shapes, seed=0, zero=False, dtype=torch.float32):
    """Return weights by name; with `zero`, every lora_B is zero, as at the start of a training."""
    tensors = make(list(shapes.values()), seed, dtype)
    return {name: t * (not (zero and "lora_B" in name)) for name, t in zip(shapes, tensors, strict=True)}


def muon(params, **options):
    """Return a Muon over parameters by name."""
    defaults = {"lr": 0.02, "weight_decay": 0.5, "lora_product": True, "ns_dtype": "fp32"}
    return Muon(list(params.items()), **{**defaults, **options})


def given(rank, layout, steps=4, dtype="float32", device="cpu", **options):
    """Step with given whole gradients in a layout, and return whole parameters and moments."""
    shapes, dtype = named(), getattr(torch, dtype)
    if layout == "ddp":
        options["replicate_group"] = dist.group.WORLD
    meshes = {}

    def put(tensor):
        if layout in ("single", "ddp"):
            return tensor
        mesh_shape, placements = placements_of(layout, tensor.ndim)
        if mesh_shape not in meshes:
            meshes[mesh_shape] = init_device_mesh(device, mesh_shape)
        return store(tensor, meshes[mesh_shape], placements)

    weights = weights_of(shapes, zero=True, dtype=dtype)
    params = {name: nn.Parameter(put(w.to(device))) for name, w in weights.items()}
    optimizer = muon(params, **options)
    for step in range(steps):
        for param, grad in zip(params.values(), make(list(shapes.values()), step + 1, dtype), strict=True):
            param.grad = put(grad.to(device))
        optimizer.step()
    return whole_state(list(params.values()), optimizer)


def given_on_stand_in(rank, layout, **options):
    """Return what `given` returns on the stand-in for an accelerator, and what the device has noted."""
    with on_device(as_host=True) as device:
        states = given(rank, layout, device="standin", **options)
    return states, device.races, device.copied


def on_the_host(rank, is_late):
    """Return the error of a Muon whose parameters FSDP2 keeps on the host, and whether weights are as they were.

    Args:
        rank: of this process.
        is_late: whether they come there after the optimizer was built, as with accelerate, so that its step sees them.
    """
    weights = weights_of(named())
    with on_device(as_host=True):
        mesh = init_device_mesh("standin", (dist.get_world_size(),))
        stored = {name: store(w.to("standin"), mesh, [Shard(0)]).to("cpu") for name, w in weights.items()}
        params = {name: nn.Parameter(w) for name, w in stored.items()}
        before = [param.to_local().clone() for param in params.values()]
        try:
            optimizer = muon({name: nn.Parameter(w) for name, w in weights.items()} if is_late else params)
            optimizer.param_groups[0]["params"] = list(params.values())
            for param in params.values():
                param.grad = torch.ones_like(param)
            optimizer.step()
        except (ValueError, RuntimeError) as error:
            kept = [torch.equal(param.to_local(), own) for param, own in zip(params.values(), before, strict=True)]
            return f"{type(error).__name__}: {error}", all(kept)
    return "", False
