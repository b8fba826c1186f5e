"""What a step launches before it looks at the gradients changes nothing if it is refused; on accelerators' paths."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_muon import Muon
from hf_muon.distributed import exchange
from hf_muon.distributed.agreement import PendingReports
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.newton_schulz import Orthogonalizer
from hf_muon.optimizer.step import MuonStep
from hf_muon.storage.early_read import EarlyRead
from tests.accelerated import accelerated
from tests.distributed.cases import make, placements_of, store

SHAPES = [(16, 32), (32, 16), (16, 32), (5, 24, 16), (3, 24, 64), (7,)]
MOMENTA = ["fp32", "bf16", "int8"]


def optimizer_of(put, **options):
    params = [nn.Parameter(put(weight)) for weight in make(SHAPES, 0)]
    groups = [{"params": params[:-1]}, {"params": params[-1:], "use_muon": False}]
    return params, Muon(groups, lr=0.01, ns_dtype="fp32", **options)


def everything(params, optimizer):
    """Return copies of all weights and moments on this rank."""
    tensors = [t for param in params for t in (param.detach(), *optimizer.state[param].values())]
    return [(t.to_local() if hasattr(t, "to_local") else t).clone() for t in tensors]


def refused(rank, layout, momentum, bad=(1,)):
    """Refuse a step that has begun on all ranks, for a gradient of some ranks, and take the next one.

    Returns:
        The error; whether the step had begun; whether it changed nothing; whether the next step is what it would have
        been without it.
    """
    ddp = layout == "ddp"
    put = torch.clone
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", placements_of(layout, 2)[0])

        def put(tensor):
            return store(tensor, mesh, placements_of(layout, tensor.ndim)[1])

    results, error, begun = [], "", []
    begin = MuonStep.begin

    def noted(self):
        begin(self)
        begun.append(bool(self._begun))

    with accelerated(), mock.patch.object(MuonStep, "begin", noted):
        for refuses in (True, False):
            group = dist.group.WORLD if ddp else None
            params, optimizer = optimizer_of(put, momentum_dtype=momentum, replicate_group=group)
            for step in (1, 2, 3):
                for param, grad in zip(params, make(SHAPES, step), strict=True):
                    param.grad = put(grad)
                if step != 2:
                    optimizer.step()
                    continue
                if refuses:
                    before = everything(params, optimizer)
                    own = params[1].grad if ddp or layout == "single" else params[1].grad.to_local()
                    if rank in bad and own.numel():
                        own.view(-1)[0] = float("nan")
                    try:
                        optimizer.step()
                    except RuntimeError as caught:
                        error = str(caught)
                    same = all(map(torch.equal, everything(params, optimizer), before))
            results.append(everything(params, optimizer))
    return error, begun[1], same, all(map(torch.equal, *results))


@pytest.mark.parametrize("momentum", MOMENTA)
def test_a_refused_step_changes_nothing(momentum):
    error, begun, same, goes_on = refused(0, "single", momentum, bad=(0,))
    assert "not finite" in error
    assert begun
    assert same
    assert goes_on


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_step_that_one_rank_refuses_changes_nothing_on_any(pools, layout, momentum):
    for error, begun, same, goes_on in pools[2].run(refused, layout=layout, momentum=momentum):
        assert "not finite" in error
        assert begun
        assert same
        assert goes_on


def order(rank, layout):
    """Return in which order a step computes, sends, looks at the agreement, and writes to weights."""
    events = []

    def noting(owner, name, event):
        original = getattr(owner, name)

        def noted(self, *args, **kwargs):
            events.append(event if isinstance(event, str) else event(self))
            return original(self, *args, **kwargs)

        return mock.patch.object(owner, name, noted)

    ddp = layout == "ddp"
    params, optimizer = optimizer_of(torch.clone, replicate_group=dist.group.WORLD if ddp else None)
    sent = exchange.Copied

    def sending(*args, **kwargs):
        events.append("send")
        return sent(*args, **kwargs)

    with accelerated():
        for step in (1, 2):
            for param, grad in zip(params, make(SHAPES, step), strict=True):
                param.grad = grad
            if step == 1:
                optimizer.step()
        with contextlib.ExitStack() as stack:
            for patch in (
                noting(Elementwise, "__call__", lambda self: self.name),
                noting(Orthogonalizer, "__call__", "orthogonalize"),
                noting(PendingReports if ddp else EarlyRead, "reports" if ddp else "tolist", "look"),
                mock.patch.object(exchange, "Copied", sending),
            ):
                stack.enter_context(patch)
            optimizer.step()
    return events


def test_one_process_orthogonalizes_before_it_looks_and_applies_after():
    events = order(0, "single")
    look = events.index("look")
    assert events.count("look") == 1
    assert {"move", "orthogonalize"} <= set(events[:look])
    assert not {"apply", "apply_rounded"} & set(events[:look])


def test_ranks_move_momentum_before_they_look_and_send_after(pools):
    for events in pools[2].run(order, layout="ddp"):
        look = events.index("look")
        assert events.count("look") == 1
        assert "move" in events[:look]
        assert not {"send", "apply", "apply_rounded", "orthogonalize"} & set(events[:look])
        assert "send" in events[look:]


def test_nothing_begins_early_where_moments_are_still_to_be_made():
    with accelerated(), mock.patch.object(MuonStep, "begin", side_effect=AssertionError):
        params, optimizer = optimizer_of(torch.clone)
        for param, grad in zip(params, make(SHAPES, 1), strict=True):
            param.grad = grad
        optimizer.step()
