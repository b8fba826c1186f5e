"""Copies between host and device: batched, and those of moments overlapped with computation."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.math.elementwise import adjacent, adjacent_runs, shaped_like
from hf_muon.storage.host import asynchronous

Moments = Mapping[str, Tensor]
# Bytes: a multiple of every dtype's size, and fast to copy.
_ALIGNMENT = 256


class Transport:
    """Brings moments from the host to a device, turn by turn, and takes them back.

    In a turn some moments are on the device. While it computes with them, those of the next turn are copied in and
    those of the last turn are copied out, each in a separate stream. The device has memory for two turns, allocated
    once. On a device without streams, copies are synchronous.

    Call `synchronize` at the end, also if a step fails.

    Args:
        device: where moments are copied to. Those on it already are not copied.
        turns: the moments of each turn, in order; views of what the host stores.
    """

    def __init__(self, device: torch.device, turns: Sequence[Sequence[Moments]]) -> None:
        self._turns = turns
        # By identity: several moments of a turn may share tensors.
        self._away = [
            {id(tensor): tensor for stored in turn for tensor in stored.values() if tensor.device.type != device.type}
            for turn in turns
        ]
        self._turn = 0
        self._device = device
        # The streams of torch.cpu do nothing.
        self._module = asynchronous(device) or torch.cpu
        self._in, self._out = _streams(device)
        sizes = [sum(map(_aligned_bytes, away.values())) for away in self._away]
        # Memory for two turns, or for the only one; one slot of no bytes if nothing is copied.
        count = max(1, min(2, sum(size > 0 for size in sizes)))
        slots = [torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device) for _ in range(count)]
        self._slots = itertools.cycle(slots)
        self._arriving: dict[int, tuple[dict[int, Tensor], Any]] = {}

    @contextlib.contextmanager
    def turn(self) -> Iterator[list[Moments]]:
        """Yield the moments of the next turn on the device, contiguous; take them back on leaving."""
        turn, self._turn = self._turn, self._turn + 1
        away = self._away[turn]
        if turn not in self._arriving:
            self._send_for(turn)
        # If the next turn needs the same tensors, it must wait until this one has written them back.
        if turn + 1 < len(self._turns) and away.keys().isdisjoint(self._away[turn + 1]):
            self._send_for(turn + 1)
        present, arrived = self._arriving.pop(turn)
        self._wait(arrived)
        yield [{key: present.get(id(tensor), tensor) for key, tensor in stored.items()} for stored in self._turns[turn]]
        with self._outward():
            # Into strided memory torch copies through a contiguous tensor of the host, which it reads at once: after an
            # asynchronous copy, before anything has arrived.
            for identity, copy in present.items():
                away[identity].copy_(copy, non_blocking=away[identity].is_contiguous())

    def synchronize(self) -> None:
        """Let the host wait for all copies."""
        for stream in (self._in, self._out):
            ended = self._module.Event()
            ended.record(stream)
            ended.synchronize()

    def _send_for(self, turn: int) -> None:
        """Start to copy the moments of a turn to the device."""
        present: dict[int, Tensor] = {}
        with self._inward() as arrived:
            if self._away[turn]:
                slot, start = next(self._slots), 0
                for identity, tensor in self._away[turn].items():
                    copy = slot[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    present[identity] = copy.copy_(tensor, non_blocking=tensor.is_contiguous())
                    start += _aligned_bytes(tensor)
        self._arriving[turn] = present, arrived

    @contextlib.contextmanager
    def _inward(self) -> Iterator[Any]:
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
    def _outward(self) -> Iterator[None]:
        """Copy out, after what was launched before."""
        self._out.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._out):
            yield

    def _wait(self, arrived: Any) -> None:
        """Let the computing stream wait for copies in."""
        self._module.current_stream(self._device).wait_event(arrived)


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Return a device's streams for copies in and out: torch has 32, of which NCCL takes its own, too."""
    module = asynchronous(device) or torch.cpu
    return module.Stream(device), module.Stream(device)


def _aligned_bytes(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT


def on_devices_of(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the devices of other tensors; neighbours in memory are copied together.

    The host waits for a device once, not for each copy. torch copies into pinned memory, of which it keeps some.

    Args:
        tensors: to copy; returned as they are if all are on the right device.
        targets: equally many tensors, each on the device to copy to.
    """
    if all(tensor.device == target.device for tensor, target in zip(tensors, targets, strict=True)):
        return list(tensors)
    runs = adjacent_runs(tensors)
    copies: list[tuple[Tensor, list[Tensor]]] = []
    for (device, _), alike in itertools.groupby(range(len(tensors)), key=lambda i: (targets[i].device, runs[i])):
        members = [tensors[i] for i in alike]
        flat = adjacent(members)
        if flat is None:
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
        copies.append((flat.to(device, non_blocking=asynchronous(flat.device) is not None), members))
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        if (module := asynchronous(device)) is not None:
            module.current_stream(device).synchronize()
    return [tensor for flat, members in copies for tensor in shaped_like(flat, members)]
