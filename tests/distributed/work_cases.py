"""Counts of the FLOPs, bytes and collectives of a deep model; pools import these functions by name."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hf_muon import Muon
from tests.distributed.cases import Counted, make, placements_of, store

LAYER = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32), "gate": (88, 32), "up": (88, 32), "down": (32, 88)}
DEEP = [shape for _ in range(24) for shape in LAYER.values()]


def counted_step(rank, layout, shapes=DEEP, **options):
    """Step a deep model; return FLOPs, bytes, collectives, buckets, and bytes of all updates."""
    weights, grads = make(shapes, 0), make(shapes, 1)
    if layout in ("single", "ddp"):
        params = [nn.Parameter(w) for w in weights]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if layout == "ddp":
            options["replicate_group"] = dist.group.WORLD
    else:
        mesh_shape, _ = placements_of(layout, 2)
        mesh = init_device_mesh("cpu", mesh_shape)
        params = [nn.Parameter(store(w, mesh, placements_of(layout, w.ndim)[1])) for w in weights]
        for param, grad in zip(params, grads, strict=True):
            param.grad = store(grad, mesh, placements_of(layout, grad.ndim)[1])
    optimizer = Muon(params, ns_dtype="fp32", **options)
    with Counted() as counted:
        optimizer.step()
    active = frozenset(range(len(shapes)))
    executors = optimizer._layout().works[0].executors
    rounds = [executor.rounds(active) for executor in executors if hasattr(executor, "rounds")]
    return {
        "flops": counted.flops,
        "bytes": counted.bytes,
        "calls": counted.calls,
        "words": counted.words,
        "rounds": sum(len(some) for some in rounds),
        "buckets": sum(len(each.buckets) for some in rounds for each in some),
        "updates": 4 * sum(w.numel() for w in weights),
    }


def events(rank, max_bucket_bytes):
    """Return the calls of a step in order, as (call, round, bucket), and rounds and bytes in flight at each gather."""
    from hf_muon.distributed.exchange import Exchange

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(store(w, mesh, [Shard(0)])) for w in make(DEEP, 0)]
    for param, grad in zip(params, make(DEEP, 1), strict=True):
        param.grad = store(grad, mesh, [Shard(0)])
    optimizer = Muon(params, ns_dtype="fp32", max_bucket_bytes=max_bucket_bytes)
    log, under_way, in_flight = [], {}, []
    active = frozenset(range(len(DEEP)))
    originals = Exchange._gather, Exchange._orthogonalize, Exchange._complete

    def place(exchange, bucket):
        return next(
            (i, each.buckets.index(bucket)) for i, each in enumerate(exchange.rounds(active)) if bucket in each.buckets
        )

    def gather(self, bucket, updates_of):
        which = place(self, bucket)
        log.append(("gather", *which))
        under_way[which[0]] = self.rounds(active)[which[0]].nbytes
        in_flight.append((len(under_way), sum(under_way.values())))
        return originals[0](self, bucket, updates_of)

    def orthogonalize(self, bucket, received, newton_schulz):
        log.append(("orthogonalize", *place(self, bucket)))
        return originals[1](self, bucket, received, newton_schulz)

    def complete(self, bucket, leaving):
        which = place(self, bucket)
        log.append(("complete", *which))
        if which[1] == len(self.rounds(active)[which[0]].buckets) - 1:
            under_way.pop(which[0])
        return originals[2](self, bucket, leaving)

    Exchange._gather, Exchange._orthogonalize, Exchange._complete = gather, orthogonalize, complete
    try:
        optimizer.step()
    finally:
        Exchange._gather, Exchange._orthogonalize, Exchange._complete = originals
    return log, in_flight
