"""A step only reads gradients, however their memory is shared, and a refused one is none to those who watch steps."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from hf_muon import build_optimizer
from tests.distributed.cases import PLAIN, VECTORS, make, muon_over, placed
from tests.support.accelerated import accelerated

SHAPES = [*(shape for shape, _ in PLAIN), *VECTORS]


def in_one_bucket(grads):
    flat, offset = torch.empty(sum(grad.numel() for grad in grads)), 0
    for grad in grads:
        yield flat[offset : offset + grad.numel()].view_as(grad).copy_(grad)
        offset += grad.numel()


def shared(grads):
    return [next(other for other in grads if other.shape == grad.shape) for grad in grads]


def expanded(grads):
    return [grad[:1].expand_as(grad) if grad.ndim else grad for grad in grads]


def stepped(rank, layout, kind, accelerates=False, **options):
    """Return local weights after two steps with gradients of a kind, which no step changes."""
    put, params = placed(make(SHAPES, 0), layout)
    local = [param.detach().to_local() if isinstance(param, DTensor) else param.detach() for param in params]
    optimizer = muon_over(params, len(PLAIN), layout, **options)
    path = accelerated if accelerates else contextlib.nullcontext
    for step in range(2):
        grads = [put(grad) for grad in make(SHAPES, step + 1)]
        stored = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        stored = list(KINDS[kind](stored))
        before = [grad.clone() for grad in stored]
        for param, grad, own in zip(params, grads, stored, strict=True):
            if isinstance(grad, DTensor):
                mesh, placements = grad.device_mesh, grad.placements
                own = DTensor.from_local(own, mesh, placements, shape=grad.shape, stride=grad.stride())
            param.grad = own
        held = [param.grad for param in params]
        with path():
            optimizer.step()
        assert all(param.grad is grad for param, grad in zip(params, held, strict=True))
        assert all(map(torch.equal, stored, before))
    return local


KINDS = {"in one bucket": in_one_bucket, "shared": shared, "expanded": expanded}
KINDS |= {f"{name}, copied": lambda grads, own=own: [g.clone() for g in own(grads)] for name, own in KINDS.items()}


@pytest.mark.first_tier(r"-\{\}$|single")
@pytest.mark.parametrize("options", [{}, {"momentum_dtype": "int8", "accelerates": True}, {"momentum": 0.0}], ids=str)
@pytest.mark.parametrize("kind", ["in one bucket", "shared", "expanded"])
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp"])
def test_gradients_that_share_memory_are_read_alone(pools, layout, kind, options):
    results = []
    for each in (kind, f"{kind}, copied"):
        arguments = {"layout": layout, "kind": each, **options}
        results.append([stepped(0, **arguments)] if layout == "single" else pools[2].run(stepped, **arguments))
    for one, other in zip(*results, strict=True):
        assert all(map(torch.equal, one, other))


def test_zeros_that_are_written_into_gradients_do_not_reach_the_state():
    """`zero_grad(set_to_none=False)` keeps the memory of gradients; a step keeps none of it."""
    weights = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
        optimizer = build_optimizer(model, lr=0.02, ns_dtype="fp32")
        for step in range(3):
            model(make([(4, 6)], step + 1)[0]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps)
        weights.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_a_refused_step_calls_no_hook_and_moves_no_average():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
    optimizer, average, calls = build_optimizer(model, lr=0.02, ns_dtype="fp32"), AveragedModel(model), []
    optimizer.register_step_post_hook(lambda *_: (calls.append(1), average.update_parameters(model)))
    for fault in (0.0, torch.nan, 0.0):
        before = copy.deepcopy(average.state_dict())
        for param in model.parameters():
            param.grad = torch.ones_like(param) + fault
        with pytest.raises(RuntimeError, match="not finite") if fault else contextlib.nullcontext():
            optimizer.step()
        changed = [key for key, value in average.state_dict().items() if not torch.equal(value, before[key])]
        assert bool(changed) == (not fault)
    assert len(calls) == 2
    assert average.n_averaged == 2
