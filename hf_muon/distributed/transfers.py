"""Updates and directions in flight between ranks: started by a function, which returns another that waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.distributed.ranks import all_gather
from hf_muon.math.elementwise import is_accelerator
from hf_muon.storage.tensors import has_data

_connected: WeakSet[dist.ProcessGroup] = WeakSet()
# Ranks that contribute less are padded in an all-gather, up to this factor of all bytes.
_PADDED = 1.25


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect all ranks of a group to one another, once, before the first all-to-all.

    NCCL makes the connections of an all-to-all when it first runs. If the device is busy then with collectives of other
    groups, which also wait for ranks, ranks may wait for one another forever. So the first one is small, and each rank
    waits until it has ended. All ranks call this together.

    Args:
        group: the process group.
        device: the device that it sends from; a host connects ranks when the group is made.
    """
    if not is_accelerator(device) or group in _connected:
        return
    _connected.add(group)
    ones = torch.ones(group.size(), dtype=torch.float32, device=device)
    received = torch.empty_like(ones)
    dist.all_to_all_single(received, ones, group=group)
    # NCCL only enqueues. Reading a value waits until all ranks are connected; fake tensors have none.
    if has_data(received):
        received.tolist()


Wait = Callable[[], list[Tensor]]
"""Waits for data in flight and returns it: flat tensors, ordered by the ranks that sent them."""


def exchanged(send: Tensor, sizes: Sequence[int], expected: Sequence[int], group: dist.ProcessGroup) -> Wait:
    """Start an all-to-all, in which each rank sends other data to each rank.

    Args:
        send: flat, ordered by destination; kept alive until it has been sent.
        sizes: elements to send to each rank.
        expected: elements to receive from each rank.
        group: the process group.
    """
    received = torch.empty(sum(expected), dtype=send.dtype, device=send.device)
    work = dist.all_to_all_single(received, send, list(expected), list(sizes), group=group, async_op=True)
    return _wait_for([work], [received], send)


def copied(send: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Wait:
    """Start to copy the data of each rank to all ranks, which need all of it.

    A rank holds its own data once, however many ranks there are. One all-gather takes the copies if ranks have about
    equally much, and otherwise a broadcast of each rank that has any.

    Args:
        send: this rank's data, flat; the same dtype on all ranks.
        sizes: elements of each rank.
        group: the process group.
    """
    longest, rank = max(sizes), dist.get_rank(group)
    if longest * len(sizes) <= _PADDED * sum(sizes):
        if len(send) < longest:
            padded = send.new_empty(longest)
            padded[: len(send)] = send
            send = padded
        rows = send.new_empty(len(sizes), longest)
        work = all_gather(rows.view(-1), send, group=group, async_op=True)
        return _wait_for([work], [row[:size] for row, size in zip(rows, sizes, strict=True)], send)
    copies = [send if r == rank else send.new_empty(size) for r, size in enumerate(sizes)]
    works = [
        dist.broadcast(copy, dist.get_global_rank(group, r), group=group, async_op=True)
        for r, copy in enumerate(copies)
        if len(copy)
    ]
    return _wait_for(works, copies, send)


def _wait_for(works: list[Any], arriving: list[Tensor], send: Tensor) -> Wait:
    keep = [send]

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        works.clear()
        # Memory is free as soon as its data has been sent, and not when this function is forgotten.
        keep.clear()
        return arriving

    return wait
