"""The run of a cell on one rank, which returns everything that is compared; pools import these functions by name."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_muon.distributed import groups, ranks
from hf_muon.storage import tensors
from tests.equality.cells import LAST, RULES, SAVED, Cell
from tests.equality.layouts import FAULTS, Layout, layout_of
from tests.rules.others import registered
from tests.support.accelerated import accelerated

VICTIM = 1
"""The rank that has the fault."""


def digest(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype, shape and a hash of each tensor's bits, by name."""

    def of(tensor: Tensor) -> str:
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"{kind} {tuple(tensor.shape)} {hashlib.blake2b(data, digest_size=8).hexdigest()}"

    return {name: of(tensor) for name, tensor in tensors.items()}


@contextlib.contextmanager
def numbers_of(cell: Cell) -> Iterator[Any]:
    """Compute with the numbers of a CPU, of a GPU, or on the stand-in for a device, which is yielded."""
    with contextlib.ExitStack() as stack:
        if cell.rule in ("others", "sinkhorn"):
            stack.enter_context(registered())
        device = None
        if cell.numbers == "gpu":
            stack.enter_context(accelerated())
        elif cell.on_device:
            device = stack.enter_context(on_device(cell.numbers))
        yield device


@contextlib.contextmanager
def on_device(numbers: str) -> Iterator[Any]:
    """Yield the stand-in, as a rank of a process group has it: `Cell.numbers` says how."""
    # Only here: a process that collects tests must not have the device.
    from tests.support import stand_in

    tensors._KNOWN_CLASSES["StandIn"] = "tests.support.stand_in"
    backends = ("standin",) if numbers == "nccl" else ("cpu", "standin")
    with (
        mock.patch.object(ranks, "report_device", lambda group, model_device: model_device),
        mock.patch.object(groups, "has_backend", lambda group, kind: kind in backends),
        accelerated(kinds=() if numbers == "host" else ("standin",)),
        stand_in.HostAccesses(),
    ):
        stand_in.DEVICE.reset()
        yield stand_in.DEVICE


@contextlib.contextmanager
def started(cell: Cell, rank: int, folder: str) -> Iterator[Layout]:
    layout = layout_of(cell, rank, folder)
    try:
        yield layout
    finally:
        layout.end()


def prepare(layout: Layout, step: int) -> None:
    """Compute the gradients of a step, and set its learning rate."""
    cell = layout.cell
    if "scheduled" in RULES[cell.rule]:
        for group in layout.optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
    grads = layout.given(step + 1)
    layout.backward({name: g for i, (name, g) in enumerate(grads.items()) if not cell.is_missing(step, i)})


def train(layout: Layout, first: int, last: int) -> None:
    for step in range(first, last):
        prepare(layout, step)
        layout.step()


def refusal_of(layout: Layout, step: int) -> str:
    """Return the error of a step before which one rank has the fault of the cell."""
    prepare(layout, step)
    is_victim = layout.rank == min(VICTIM, layout.cell.ranks - 1)
    fault = FAULTS[layout.cell.fault](layout) if is_victim else contextlib.nullcontext()
    with fault:
        try:
            layout.step()
            return "no error"
        except RuntimeError as error:
            return str(error)
        finally:
            layout.optimizer.zero_grad()


def run(rank: int, cell: Cell, folder: str) -> dict[str, Any]:
    """Train, save in between, refuse a step, and resume from what was saved; return digests of each."""
    results: dict[str, Any] = {"refusal": None}
    path = f"{folder}/checkpoint"
    with numbers_of(cell) as device:
        with started(cell, rank, folder) as layout:
            train(layout, 0, SAVED)
            results["saved"] = digest(layout.tensors())
            if cell.then:
                layout.save(path)
            if cell.fault:
                results["refusal"] = refusal_of(layout, LAST - 1)
            if device is not None:
                device.reset()
            train(layout, SAVED, LAST)
            if device is not None:
                results["races"], results["copied"] = list(device.races), dict(device.copied)
            results["last"] = digest(layout.tensors())
        if cell.then:
            results["resumed"] = finish(rank, cell, folder)[1]
    return results


def finish(rank: int, cell: Cell, folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """Load what was saved, and take the rest of the steps; return digests of what was loaded, and of the end."""
    with numbers_of(cell), started(cell, rank, folder) as layout:
        layout.load(f"{folder}/checkpoint")
        loaded = digest(layout.tensors())
        train(layout, SAVED, LAST)
        return loaded, digest(layout.tensors())


@functools.lru_cache(maxsize=256)
def alone(cell: Cell) -> dict[str, Any]:
    """Return what one process computes, by `run`; the reference of all cells with this `Cell.alone`."""
    return run(0, cell, "")
