"""Counts of the FLOPs, bytes and collectives of a deep model; pools import these functions by name."""

from __future__ import annotations

import contextlib
from weakref import WeakSet

import torch.distributed as dist

from tests.distributed.cases import make, muon_over, placed
from tests.equality.counted import Counted

LAYER = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32), "gate": (88, 32), "up": (88, 32), "down": (32, 88)}
DEEP = [shape for _ in range(24) for shape in LAYER.values()]


def with_gradients(shapes, layout, **options):
    """Return parameters that have gradients, and their optimizer."""
    put, params = placed(make(shapes, 0), layout)
    for param, grad in zip(params, make(shapes, 1), strict=True):
        param.grad = put(grad)
    return params, muon_over(params, len(params), layout, **options)


def counted_step(rank, layout, shapes=DEEP, **options):
    """Step a deep model; return FLOPs, bytes, collectives, rounds, returns, and bytes of all updates."""
    weights = make(shapes, 0)
    _, optimizer = with_gradients(shapes, layout, **options)
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
        "returns": sum(len(each.returns) for some in rounds for each in some),
        "updates": 4 * sum(w.numel() for w in weights),
    }


def events(rank, layout, max_batch_bytes):
    """Return the calls of a step in order, each with the number of its round."""
    from hf_muon.distributed.exchange import Exchange

    _, optimizer = with_gradients(DEEP, layout, max_batch_bytes=max_batch_bytes)
    with logged(Exchange) as log:
        optimizer.step()
    return log


@contextlib.contextmanager
def logged(exchange):
    """Note the calls of an exchange: what it does, and the number of the round.

    It gathers updates, or moves momentum where each owner has them; it orthogonalizes, returns directions, and waits
    for them.
    """
    log, places = [], {}
    names = {"_gather": "gather", "_orthogonalize": "orthogonalize", "_return": "return", "_complete": "complete"}
    originals = {name: getattr(exchange, name) for name in names}

    def noted(name):
        def call(self, part, *args):
            if not places:
                for k, each in enumerate(self._planned[1]):
                    places.update(dict.fromkeys([each, *each.returns], k))
            sends = getattr(part, "gathers", True) or name != "_gather"
            log.append((names[name] if sends else "move", places[part]))
            return originals[name](self, part, *args)

        return call

    for name in names:
        setattr(exchange, name, noted(name))
    try:
        yield log
    finally:
        for name, original in originals.items():
            setattr(exchange, name, original)


def all_to_alls(rank, layout, optimizers=2):
    """Return the elements and the process group of each all-to-all of some optimizers' steps, as on an accelerator."""
    from unittest import mock

    from hf_muon.distributed import transfers
    from tests.accelerated import accelerated

    calls, original = [], dist.all_to_all_single

    def noted(received, send, *args, group, **kwargs):
        calls.append((send.numel(), group.group_name))
        return original(received, send, *args, group=group, **kwargs)

    with (
        accelerated(),
        mock.patch.object(dist, "all_to_all_single", noted),
        mock.patch.object(transfers, "_connected", WeakSet()),
    ):
        for _ in range(optimizers):
            put, params = placed(make([(8, 6)] * 3, 0), layout)
            optimizer = muon_over(params, 3, layout)
            for step in range(2):
                for param, grad in zip(params, make([(8, 6)] * 3, step + 1), strict=True):
                    param.grad = put(grad)
                optimizer.step()
    return calls
