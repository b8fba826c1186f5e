"""The measured cost of a step on a rank, to compare with plans; and a run with diagnostics."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.live_bytes import LiveBytes
from hf_muon import build_optimizer
from hf_muon.storage.tensors import local_of
from tests.accelerated import accelerated, uncomputed
from tests.distributed.cases import Counted
from tests.distributed.training import Model, train, wrap


class Stack(nn.Module):
    """Experts, stored as (in, out)."""

    num_experts, is_transposed = 3, True

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 10, 18))


class Several(Model):
    """A model with fused, grouped and transposed weights; no test calls its forward."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2)
        self.conv = nn.Conv1d(6, 8, 3, groups=2)
        self.experts = Stack()


def measured(rank, layout, dtype="float32", **options):
    """Return the bytes sent, the FLOPs and the peak of a step, and the bytes of what is stored after it.

    The step is that of an accelerator, where elementwise functions have no temporary tensors.
    """
    torch.manual_seed(0)
    model, _, _ = wrap(Several().to(getattr(torch, dtype)), layout)
    optimizer = build_optimizer(model, **{"ns_dtype": "fp32", **options})
    params = list(model.parameters())
    with accelerated(), uncomputed(), Counted() as counted:
        _set_gradients(params)
        optimizer.step()
    _set_gradients(params)
    with accelerated(), uncomputed(), LiveBytes() as memory:
        optimizer.step()
    return {
        "sent_bytes": counted.bytes,
        "flops": counted.flops,
        "state_bytes": _bytes(value for state in optimizer.state.values() for value in state.values()),
        "weight_bytes": _bytes(params),
        "gradient_bytes": _bytes(param.grad for param in params),
        "peak": memory.peak,
    }


def _set_gradients(params):
    for param in params:
        param.grad = torch.randn_like(param)


def _bytes(tensors):
    return sum(local_of(tensor).numel() * tensor.element_size() for tensor in tensors)


def watched(rank, layout, folder):
    """Return whether weights and states equal those of a run without diagnostics."""
    without = train(rank, layout, last=4)
    file = f"{folder}/{rank}.jsonl"
    measured_run = train(rank, layout, last=4, diagnostics_every=2, diagnostics_file=file)
    same = all(
        torch.equal(value, measured_run["states"][name][key])
        for name, values in without["states"].items()
        for key, value in values.items()
    )
    return same and without["losses"] == measured_run["losses"]
