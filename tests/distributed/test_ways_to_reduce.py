"""Ranks of DDP share a step if and only if DDP has reduced its gradients, in whatever way: AdamW's replicas say which.

Each seed draws for every step one or two backward passes. Ranks import functions such as `draws` by name.
"""

from __future__ import annotations

import contextlib
import importlib
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_muon import Muon
from tests.integrations.accelerate_cases import shared_steps

STEPS = 3
PASSES = ["called", "forward", "evaluated", "triggered", "manual", "no_sync", "past", "twice"]
WRAPPERS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "ignored buffer": {},
    "reentrant": {},
    "checkpointed": {},
    "static reentrant": {"static_graph": True},
    "compiled": {},
    "python reducer": {},
    "replicate": {},
}


class Net(nn.Module):
    """Layers, with or without checkpoints; or a function that takes a whole step, as Lightning redirects `forward`."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.kind, self.redirected = kind, None
        if kind == "ignored buffer":
            self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
            self._ddp_params_and_buffers_to_ignore = ["mask"]

    def forward(self, x):
        return self.apply_layers(x) if self.redirected is None else self.redirected(x)

    def apply_layers(self, x):
        for layer in self.layers:
            if self.kind in ("checkpointed", "reentrant", "static reentrant"):
                x = checkpoint(layer, x, use_reentrant=self.kind != "checkpointed")
            else:
                x = layer(x)
        return x


def wrapped(kind):
    """Return a model and what reduces its gradients; the model and itself, if that is no module of its own."""
    net = Net(kind)
    if kind == "replicate":
        return net, importlib.import_module("torch.distributed._composable.replicate").replicate(net)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer" if kind == "python reducer" else True):
        return net, DistributedDataParallel(net, **WRAPPERS[kind])


def run_pass(net, ddp, way, rows, kind):
    """Run a forward and a backward pass; the wrapper of `replicate` is the model itself."""
    call = torch.compile(ddp, backend="eager") if kind == "compiled" else ddp
    sync = contextlib.nullcontext()
    if way in ("no_sync", "triggered"):
        sync = no_sync(net, kind) if kind == "replicate" else ddp.no_sync()

    def trained(rows):
        reduce(ddp, net.apply_layers(rows).square().sum()).backward()
        ddp.require_backward_grad_sync = False

    with sync:
        if way == "manual":
            net.redirected = trained
            ddp(rows)
            net.redirected, ddp.require_backward_grad_sync = None, True
            return
        output = {"forward": ddp.forward, "past": net}.get(way, call)(rows)
        loss = output.square().sum()
        if way == "twice":
            output[0].sum().backward(retain_graph=True)
        elif way == "evaluated":
            with torch.no_grad():
                ddp(rows)
        (reduce(ddp, loss) if way == "triggered" else loss).backward()


def reduce(ddp, loss):
    """Let the next backward pass reduce, as accelerate and Lightning do when the forward pass has not said so."""
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    ddp.reducer.prepare_for_backward([loss])
    return loss


@contextlib.contextmanager
def no_sync(net, kind):
    """Let no backward pass reduce the gradients of a model in `replicate`."""
    net.set_requires_gradient_sync(False)
    yield
    net.set_requires_gradient_sync(True)


def ways_of(seed, kind):
    """Draw the backward passes of each step."""
    drawn = random.Random(seed)
    ways = {
        # A model in `replicate` has no wrapper to call.
        "replicate": ["called", "no_sync"],
        # The first pass of a static graph finds out which parameters are used, so it must be a usual one.
        "static": ["called", "forward", "no_sync"],
        "static reentrant": ["called", "forward", "no_sync"],
    }.get(kind, PASSES)
    steps = [[drawn.choice(ways) for _ in range(drawn.randint(1, 2))] for _ in range(STEPS)]
    if "static" in kind:
        steps[0] = ["called"]
    return steps


def trained(rank, kind, steps, make):
    """Train; return the weights, and for each step whether both ranks have the same gradients."""
    net, ddp = wrapped(kind)
    params = list(net.parameters())
    optimizer, equal = make(params), []
    for i, ways in enumerate(steps):
        optimizer.zero_grad()
        for k, way in enumerate(ways):
            generator = torch.Generator().manual_seed(100 * i + 10 * k + rank)
            rows = torch.randn(4, 16, generator=generator, requires_grad="reentrant" in kind)
            run_pass(net, ddp, way, rows, kind)
        grads = torch.cat([param.grad.flatten() for param in params])
        both = [torch.empty_like(grads) for _ in range(dist.get_world_size())]
        dist.all_gather(both, grads)
        equal.append(torch.equal(*both))
        optimizer.step()
    return [param.detach().clone() for param in params], equal


def draws(rank, kind, seeds):
    """Compare Muon with AdamW and with a Muon that takes each step by itself; return how many steps were shared."""
    own = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    counts = [0, 0]
    for seed in seeds:
        steps = ways_of(seed, kind)
        _, equal = trained(rank, kind, steps, lambda params: torch.optim.AdamW(params, lr=0.02))
        expected, _ = trained(rank, kind, steps, lambda params: Muon(params, lr=0.02, replicate_group=own))
        with shared_steps() as shared:
            weights, _ = trained(rank, kind, steps, lambda params: Muon(params, lr=0.02))
        # After a step by gradients of its own, a rank has moments of its own.
        assert shared == [all(equal[: i + 1]) for i in range(STEPS)], (seed, steps, equal, shared)
        assert all(map(torch.equal, weights, expected)), (seed, steps)
        for is_shared in shared:
            counts[is_shared] += 1
    return counts


@pytest.mark.first_tier("plain|static]|compiled")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_steps_are_shared_if_and_only_if_ddp_has_reduced_their_gradients(pools, kind):
    for own, shared in pools[2].run(draws, kind=kind, seeds=list(range(12))):
        assert own > 0
        assert shared > 0


def after_an_accident(rank, accident):
    """Step as usual, in `no_sync` with an accident on rank 1, and as usual; return when ranks had parted."""
    net, ddp = wrapped("plain")
    optimizer, kept, parted = Muon(net.parameters(), lr=0.02), [], []
    for step in range(5):
        way = "no_sync" if step == 2 and accident != "old wrapper" else "called"
        hit = accident if rank == 1 and step == 2 else ""
        optimizer.zero_grad()
        if step == 2 and accident == "old wrapper":
            kept += [ddp] * rank
            ddp = DistributedDataParallel(net, process_group=dist.new_group([0, 1]))
        if hit != "no batch":
            run_pass(net, ddp, way, torch.randn(4, 16, generator=torch.Generator().manual_seed(rank + step)), "plain")
        if hit != "no step":
            optimizer.step()
        if hit == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        # As a loop does that logs the mean loss: whoever waited for a step would meet this.
        dist.all_reduce(torch.ones(3))
        parted.append(optimizer.replicas.have_parted)
    return parted


@pytest.mark.parametrize("accident", ["no step", "no batch", "load", "old wrapper"])
def test_no_rank_waits_for_one_that_does_not_share(pools, accident):
    first, other = pools[2].run(after_an_accident, accident=accident)
    ends_parted = accident != "old wrapper"
    assert first == [False, False, ends_parted, ends_parted, ends_parted]
    assert other == [False, False, False, ends_parted, ends_parted]
