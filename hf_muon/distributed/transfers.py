"""Updates and directions in flight between ranks; each transfer keeps what it sends alive until it has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.distributed.agreement import all_gather
from hf_muon.math.elementwise import is_accelerator
from hf_muon.storage.tensors import has_data

_connected: WeakSet[dist.ProcessGroup] = WeakSet()
# Ranks that contribute less are padded in an all-gather, up to this factor of all bytes.
_PADDED = 1.25


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have all ranks of a group connect to one another, once, before the first all-to-all.

    NCCL makes the connections of an all-to-all when it first runs. If the device is busy then with collectives of other
    groups, which also wait for ranks, ranks may wait for one another forever. So the first one is small, and each rank
    waits until it has ended. All ranks call this together.

    Args:
        group: the process group.
        device: from which it communicates; a host connects ranks when the group is made.
    """
    if not is_accelerator(device) or group in _connected:
        return
    _connected.add(group)
    ones = torch.ones(group.size(), device=device)
    received = torch.empty_like(ones)
    dist.all_to_all_single(received, ones, group=group)
    if has_data(received):
        received.tolist()


class Transfer(Protocol):
    """Data in flight."""

    def wait(self) -> list[Tensor]:
        """Return what has arrived, flat tensors, ordered by source."""
        ...


class Arrived(NamedTuple):
    """Data that no rank has to send."""

    parts: list[Tensor]

    def wait(self) -> list[Tensor]:
        """Return the data, see `Transfer`."""
        return self.parts


class Exchanged:
    """An all-to-all in flight: each rank sends other data to each rank.

    Args:
        send: flat, ordered by destination.
        sizes: elements to send to each rank.
        expected: elements to receive from each rank.
        group: the process group.
    """

    def __init__(self, send: Tensor, sizes: Sequence[int], expected: Sequence[int], group: dist.ProcessGroup) -> None:
        self._send: Tensor | None = send
        self._received = torch.empty(sum(expected), dtype=send.dtype, device=send.device)
        self._work = dist.all_to_all_single(
            self._received, send, list(expected), list(sizes), group=group, async_op=True
        )

    def wait(self) -> list[Tensor]:
        """Return what has arrived, see `Transfer`."""
        self._work.wait()
        self._send = None
        return [self._received]


class Copied:
    """Copies in flight of the data of each rank, to all ranks, which need all of it.

    A rank holds its own data once, however many ranks there are. One all-gather takes the copies if ranks have about
    equally much, and otherwise a broadcast of each rank that has any.

    Args:
        own: flat; the same dtype on all ranks.
        sizes: elements of each rank.
        group: the process group.
    """

    def __init__(self, own: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        longest, rank = max(sizes), dist.get_rank(group)
        self._own = own
        if longest * len(sizes) <= _PADDED * sum(sizes):
            if len(own) < longest:
                self._own = own.new_empty(longest)
                self._own[: len(own)] = own
            gathered = own.new_empty(len(sizes), longest)
            self._parts = [part[:size] for part, size in zip(gathered, sizes, strict=True)]
            self._works = [all_gather(gathered.view(-1), self._own, group=group, async_op=True)]
        else:
            self._parts = [own if r == rank else own.new_empty(size) for r, size in enumerate(sizes)]
            self._works = [
                dist.broadcast(part, dist.get_global_rank(group, r), group=group, async_op=True)
                for r, part in enumerate(self._parts)
                if len(part)
            ]

    def wait(self) -> list[Tensor]:
        """Return what has arrived, see `Transfer`."""
        for work in self._works:
            work.wait()
        self._works = []
        return self._parts
