"""Copies between the host's memory and a device: few of them, and those of moments while the device computes."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hf_muon.math.elementwise import adjacent, adjacent_runs, shaped_like
from hf_muon.storage.host import asynchronous

_ALIGNMENT = 256  # bytes; a multiple of every dtype's size, and of what copy engines like


class Transport:
    """Brings tensors from the host to a device, turn by turn, and takes them back.

    In a turn some tensors are on the device. While it computes with them, those of the next turn are copied in and
    those of the last turn are copied out, each in a stream of its own. The device has memory for two turns, allocated
    once.

    Use it as a context manager: on leaving, the host waits until everything is back in its memory. On a device without
    streams, and on the CPU, copies take place when they are asked for.

    Args:
        device: to which tensors are brought. Those that are there already are neither copied nor taken back.
        turns: the tensors of each turn, in order; views of what the host stores.
    """

    def __init__(self, device: torch.device, turns: Sequence[Sequence[Tensor]]) -> None:
        self._device = device
        self._turns = turns
        self._turn = 0
        self._streams = _streams_of(device)
        largest = max((self._nbytes(turn) for turn in turns), default=0)
        count = max(1, min(2, sum(self._nbytes(turn) > 0 for turn in turns)))  # one for tensors without elements
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(count)]
        self._in_use = 0
        self._arriving: dict[int, tuple[list[Tensor], Any]] = {}
        self._present: list[Tensor] = []

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.synchronize()

    def bring(self) -> list[Tensor]:
        """Begin the next turn, and return its tensors on the device, contiguous."""
        turn = self._turn
        if turn not in self._arriving:
            self._send_for(turn)
        if turn + 1 < len(self._turns) and not _share(self._turns[turn], self._turns[turn + 1]):
            self._send_for(turn + 1)
        self._present, arrived = self._arriving.pop(turn)
        self._streams.wait(arrived)
        return self._present

    def take_back(self) -> None:
        """End the turn: copy its tensors into the host's memory, once what was launched so far has written to them."""
        with self._streams.outward():
            for here, there in zip(self._present, self._turns[self._turn], strict=True):
                if here is not there:
                    there.copy_(here, non_blocking=there.is_contiguous())
        self._present = []
        self._turn += 1

    def _send_for(self, turn: int) -> None:
        """Start to copy the tensors of a turn to the device."""
        tensors = []
        with self._streams.inward() as arrived:
            start = 0
            for there in self._turns[turn]:
                if self._is_here(there):
                    tensors.append(there)
                    continue
                nbytes = there.numel() * there.dtype.itemsize
                slot = self._slots[self._in_use % len(self._slots)]
                here = slot[start : start + nbytes].view(there.dtype).view(there.shape)
                tensors.append(here.copy_(there, non_blocking=there.is_contiguous()))
                start += _aligned(nbytes)
            self._in_use += start > 0
        self._arriving[turn] = tensors, arrived

    def _nbytes(self, turn: Sequence[Tensor]) -> int:
        return sum(_aligned(there.numel() * there.dtype.itemsize) for there in turn if not self._is_here(there))

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type


def beside(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the devices of others: those that lie one after the other in memory in one copy.

    The host waits for a device once, not for each copy. torch copies into pinned memory, of which it keeps some.

    Args:
        tensors: that are to be brought; returned themselves if all are there.
        others: as many.
    """
    if all(tensor.device == other.device for tensor, other in zip(tensors, others, strict=True)):
        return list(tensors)
    runs = adjacent_runs(tensors)
    copies: list[tuple[Tensor, list[Tensor]]] = []
    modules: dict[torch.device, Any] = {}
    for (device, _), alike in itertools.groupby(range(len(tensors)), key=lambda i: (others[i].device, runs[i])):
        own = [tensors[i] for i in alike]
        flat = adjacent(own)
        if flat is None:
            flat = torch.cat([tensor.reshape(-1) for tensor in own])
        module = modules.setdefault(flat.device, asynchronous(flat.device))
        copies.append((flat.to(device, non_blocking=module is not None), own))
    for device, module in modules.items():
        if module is not None:
            module.current_stream(device).synchronize()
    return [tensor for flat, own in copies for tensor in shaped_like(flat, own)]


def _share(turn: Sequence[Tensor], following: Sequence[Tensor]) -> bool:
    """Return whether two turns have a tensor in common, which must be back before it is brought again."""
    return not {id(tensor) for tensor in turn}.isdisjoint(map(id, following))


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT


class _NoStreams:
    """A device that does everything in the order in which it is asked to."""

    @contextlib.contextmanager
    def inward(self) -> Iterator[None]:
        yield

    def outward(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait(self, arrived: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Streams:
    """Streams for copies to a device and from it, beside the one that computes.

    Args:
        module: torch.cuda, or another one with its functions.
        device: the device.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._in, self._out = module.Stream(device), module.Stream(device)

    @contextlib.contextmanager
    def inward(self) -> Iterator[Any]:
        """Copy in, after what was launched before and after all copies out: memory and tensors may be the same ones.

        Yields:
            An event, which is recorded on leaving.
        """
        arrived = self._module.Event()
        self._in.wait_stream(self._module.current_stream(self._device))
        self._in.wait_stream(self._out)
        with self._module.stream(self._in):
            yield arrived
            arrived.record(self._in)

    @contextlib.contextmanager
    def outward(self) -> Iterator[None]:
        """Copy out, after what was launched before."""
        self._out.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._out):
            yield

    def wait(self, arrived: Any) -> None:
        """Let the computing stream wait for copies in."""
        self._module.current_stream(self._device).wait_event(arrived)

    def synchronize(self) -> None:
        """Let the host wait for all copies."""
        self._in.synchronize()
        self._out.synchronize()


def _streams_of(device: torch.device) -> _NoStreams | _Streams:
    module = asynchronous(device)
    return _NoStreams() if module is None else _Streams(module, device)
