"""Steps on a stand-in for accelerators, by the ranks of pools of their own.

Functions import `tests.support.stand_in`, which registers a device: a process that collects tests must not have one.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch import nn

from hf_muon import build_optimizer
from hf_muon.distributed import groups, ranks
from hf_muon.math import newton_schulz
from hf_muon.storage import host, tensors, transport
from tests.support.accelerated import accelerated, sized, uncomputed

tensors._KNOWN_CLASSES["StandIn"] = "tests.support.stand_in"
MATRICES, SHAPE = 16, (256, 320)
CHUNK = 2**15  # elements of a chunk of AdamW's


@contextlib.contextmanager
def on_device(backends=("cpu", "standin"), as_host=False):
    """Yield the device, as a rank of a process group has it.

    Args:
        backends: devices that the process group communicates from.
        as_host: whether elementwise functions and units are those of a CPU, so that results are, too.
    """
    from tests.support import stand_in

    ranks.report_device = lambda group, model_device: model_device
    groups.has_backend = lambda group, kind: kind in backends
    stand_in.DEVICE.reset()
    with (
        mock.patch.object(host, "SMALLEST", 0),
        accelerated(kinds=() if as_host else ("standin",)),
        stand_in.HostAccesses(),
    ):
        yield stand_in.DEVICE


class Net(nn.Module):
    """Matrices of two shapes, biases, an embedding and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(600, 256)
        self.layers = nn.ModuleList(nn.Linear(*SHAPE) for _ in range(MATRICES // 2))
        self.back = nn.ModuleList(nn.Linear(*SHAPE[::-1]) for _ in range(MATRICES // 2))
        self.lm_head = nn.Linear(256, 600)


def on_stand_in(model, but=""):
    for path, module in model.named_modules():
        if but and path.startswith(but):
            continue
        for name, param in list(module._parameters.items()):
            if param is not None:
                module._parameters[name] = nn.Parameter(param.detach().to("standin"))
    return model


def train(
    rank,
    steps=2,
    first=0,
    dtype="float32",
    state=None,
    broken=None,
    chunk=CHUNK,
    compiles=False,
    on_host="",
    **options,
):
    """Step a model on the device; return weights, the optimizer's state dict, and what the device has noted.

    Args:
        broken: a method of `transport.Transport` that orders nothing.
        on_host: how the names of modules begin that are not on the device.
        compiles: whether elementwise functions have no temporary tensors, as where they are compiled; nor results here.
    """
    from tests.support import stand_in

    model = on_stand_in(Net().to(getattr(torch, dtype)), on_host)
    optimizer = build_optimizer(model, **{"lr": 1e-2, "ns_dtype": "fp32", **options})
    if state is not None:
        weights, states = state
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.data.copy_(weight)
        optimizer.load_state_dict(states)
    device = stand_in.DEVICE
    with contextlib.ExitStack() as stack:
        stack.enter_context(sized(chunk=chunk))
        if compiles:
            stack.enter_context(uncomputed())
            stack.enter_context(accelerated(kinds=("standin",)))
        stack.enter_context(stand_in.HostAccesses())
        if broken:
            stack.enter_context(mock.patch.object(transport.Transport, broken, unordered(broken)))
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
            device.reset()
            before = device.nbytes()
            optimizer.step()
            for own in optimizer.state.values():
                for value in own.values():
                    value.sum()  # by the host, where it is stored there
    notes = {
        "peak": device.peak - before,
        "after": device.nbytes() - before,
        "races": device.races,
        "copied": dict(device.copied),
        "dtypes": device.dtypes,
        "devices": {name: kinds(optimizer.state[param]) for name, param in model.named_parameters()},
        "state bytes": sum(
            value.numel() * value.dtype.itemsize
            for own in optimizer.state.values()
            for key, value in own.items()
            if key != "step" and value.device.type == "cpu"
        ),
    }
    weights = [param.detach().cpu() for param in model.parameters()]
    state = optimizer.state_dict()
    state["state"] = {key: {name: value.cpu() for name, value in own.items()} for key, own in state["state"].items()}
    return weights, state, notes


def kinds(state):
    return sorted({value.device.type for key, value in state.items() if key != "step"})


def unordered(name):
    """Return a method of `transport.Transport` that orders nothing."""

    @contextlib.contextmanager
    def in_stream(self):
        event = self._module.Event()
        with self._module.stream(self._in if name == "_inward" else self._out):
            yield event
            event.record(self._in)

    return in_stream if name in ("_inward", "_outward") else lambda self, *args: None


def failing(rank):
    """Let a step fail while copies are under way; return the races of the host with them."""
    from tests.support import stand_in

    model = on_stand_in(Net())
    optimizer = build_optimizer(model, {"lr": 1e-2, "ns_dtype": "fp32", "momentum_offload": "cpu"})
    for param in model.parameters():
        param.grad = torch.ones(param.shape).to("standin")

    def fail(*args, **options):
        raise MemoryError

    device = stand_in.DEVICE
    device.reset()
    with mock.patch.object(newton_schulz, "newton_schulz", fail), stand_in.HostAccesses():
        with contextlib.suppress(MemoryError):
            optimizer.step()
            return ["no failure"]
        for value in (value for own in optimizer.state.values() for value in own.values()):
            value.sum()
    return device.races
