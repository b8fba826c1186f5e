"""Runs with `qk_clip` in a layout, by the ranks of a pool, which import these functions by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard

from hf_muon import build_optimizer
from hf_muon.storage.rows import scale_rows_
from tests.distributed.training import wrap
from tests.equality.placed import stored, whole
from tests.rules.attention_models import enlarge, make, tokens

TP_PLAN = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}


def build(model, lr, options):
    return build_optimizer(model, lr=lr, ns_dtype="fp32", **{"qk_clip": 2.0, **options})


def clipped(rank, layout, name="llama", steps=3, lr=0.0, accumulate=1, evaluating=(), **options):
    """Train, and return the whole weights and the logits of each step; one head begins far beyond the threshold.

    Args:
        rank: of this process.
        layout: as of `wrap`; with `fsdp-swapped` the optimizer is built before the model is sharded.
        name: of the model.
        steps: number of steps.
        lr: learning rate.
        accumulate: batches of a step and rank.
        evaluating: ranks whose model is in evaluation mode, so that they measure nothing.
        **options: of the optimizer.
    """
    model = make(name)
    enlarge(model, name, 1, 2, 1e5)
    swapped = layout == "fsdp-swapped"
    built = build(model, lr, options) if swapped else None
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    model, shards, place = wrap(model, "fsdp" if swapped else layout, layers, TP_PLAN)
    if rank in evaluating:
        model.eval()
    optimizer = built or build(model, lr, options)
    if swapped:  # as accelerate does
        params = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [params[n] for n in group["param_names"]]
    logits = []
    finish = optimizer.head_rules.finish

    def keep(*args, **kwargs):
        result = finish(*args, **kwargs)
        logits.append(result)
        return result

    optimizer.head_rules.finish = keep
    for step in range(steps):
        optimizer.zero_grad()
        ids = tokens(step, batch=8)
        own = ids.view(shards, accumulate, -1, ids.shape[-1])[place]
        for part in own:
            (model(input_ids=part, labels=part).loss / accumulate).backward()
        optimizer.step()
    return {n.removeprefix("module."): whole(p) for n, p in model.named_parameters()}, logits


def refused(rank, **options):
    """Return the error of a step in which no wrapper has reduced gradients."""
    model = nn.parallel.DistributedDataParallel(make("llama"))
    optimizer = build_optimizer(model, qk_clip=100)
    with model.no_sync():
        model(input_ids=tokens(rank), labels=tokens(rank)).loss.backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def scaled(rank, seed):
    """Return whole tensors of random placements before and after their rows or columns were scaled, with the factors.

    The mesh is 2 x 2, and sizes are not divisible by the number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 2))
    kinds = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]
    results = []
    for first in kinds:
        for second in kinds[:3]:
            shape = torch.randint(1, 12, (2,), generator=generator).tolist()
            tensor = torch.randn(shape, generator=generator)
            for dim in (0, 1):
                factors = torch.rand(shape[dim], generator=generator)
                param = nn.Parameter(stored(tensor, mesh, (first, second)))
                scale_rows_(param, factors, dim)
                results.append((tensor, factors, dim, whole(param)))
    return results
