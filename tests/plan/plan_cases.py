"""What a step really costs on a rank, for plans to be compared with; and a run that is watched."""

from __future__ import annotations

import torch
from torch import nn

from hf_muon import build_optimizer
from hf_muon.storage.tensors import local_of
from tests.distributed.cases import Counted
from tests.distributed.training import Model, train, wrap


class Stack(nn.Module):
    """Experts that are stored as (in, out)."""

    num_experts, is_transposed = 3, True

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 10, 18))


class Several(Model):
    """With weights that are several matrices, or stored otherwise; they are not called."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2)
        self.conv = nn.Conv1d(6, 8, 3, groups=2)
        self.experts = Stack()


def measured(rank, layout, dtype="float32", **options):
    """Bytes and FLOPs of a step, and bytes of the state after it."""
    torch.manual_seed(0)
    model, _, _ = wrap(Several().to(getattr(torch, dtype)), layout)
    optimizer = build_optimizer(model, {"ns_dtype": "fp32", **options})
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    with Counted() as counted:
        optimizer.step()
    tensors = [local_of(value) for state in optimizer.state.values() for value in state.values()]
    return {
        "sent_bytes": counted.bytes,
        "flops": counted.flops,
        "state_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


def watched(rank, layout, folder):
    """Whether weights and states are those of a run that nobody watches, and how many lines this rank has written."""
    without = train(rank, layout, last=4)
    file = f"{folder}/{rank}.jsonl"
    seen = train(rank, layout, last=4, diagnostics_every=2, diagnostics_file=file)
    same = all(
        torch.equal(value, seen["found"][name][key])
        for name, values in without["found"].items()
        for key, value in values.items()
    )
    return same and without["losses"] == seen["losses"]
