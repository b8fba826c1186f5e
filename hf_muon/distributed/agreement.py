"""What ranks report to one another before a step, so that all of them take it or all refuse it.

Nothing of variable length is sent before all ranks have agreed on its length. A step begins with `PendingReports`, one
collective of five numbers per rank; more follows only if something is wrong or a gradient is missing on some rank.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.math.elementwise import is_accelerator
from hf_muon.storage.early_read import EarlyRead

_BITS = 62  # in an int64, clear of its sign
# torch 2.13 renamed it and deprecates the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class RankReport:
    """What one rank reports before a step.

    Attributes:
        fingerprint: of options and of how parameters are stored; must be the same on all ranks.
        gradients: fingerprint of which parameters have a gradient and of how gradients are stored.
        complains: whether the rank has complaints.
        flags: two numbers computed on the device.
    """

    fingerprint: int
    gradients: int
    complains: bool
    flags: tuple[int, ...]


class PendingReports:
    """Reports of the group's ranks, in their order, under way: one collective, and one read of the device.

    Args:
        group: of all ranks that take part in the step.
        model_device: of the parameters; of the same type on all ranks.
        fingerprint: at most 62 bits.
        gradients: at most 62 bits.
        complains: whether this rank has complaints.
        flags: ``(2,)``, int64, still on the device.

    Attributes:
        go: whether all ranks report what this one does, no complaints, and flags of 0 and 1: 0-dim bool on the model's
            device. None if reports do not travel there.
        read: of the reports; None if they do not travel there.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        model_device: torch.device,
        fingerprint: int,
        gradients: int,
        complains: bool,
        flags: Tensor,
    ) -> None:
        device = report_device(group, model_device)
        numbers = torch.tensor([0, 1, fingerprint, gradients, 0, int(complains)], dtype=torch.int64)
        numbers = numbers.to(device, non_blocking=True)
        own = torch.cat([flags.to(device), numbers[2:4], numbers[5:]])
        self._gathered = torch.empty(group.size(), len(own), dtype=torch.int64, device=device)
        self._work = all_gather(self._gathered.view(-1), own, group=group, async_op=True)
        self.go: Tensor | None = None
        if is_accelerator(device) and device == model_device:
            self._work.wait()  # which the device does, and not the host
            self.go = (self._gathered == numbers[:5]).all()
        self.read: EarlyRead | None = EarlyRead(self._gathered) if self.go is not None else None

    def reports(self) -> list[RankReport]:
        """Wait for the reports and return them."""
        if self.read is None:
            self._work.wait()
        rows = (self.read or self._gathered).tolist()
        return [RankReport(row[2], row[3], bool(row[4]), tuple(row[:2])) for row in rows]


def exchange_bits(group: dist.ProcessGroup, model_device: torch.device, bits: Sequence[bool]) -> list[list[bool]]:
    """Gather the bits of each rank; all ranks must have agreed on their number."""
    rows = gather(group, model_device, torch.tensor(pack_bits(bits), dtype=torch.int64))
    return [unpack_bits(row, len(bits)) for row in rows]


def exchange_texts(group: dist.ProcessGroup, model_device: torch.device, texts: Sequence[str]) -> list[list[str]]:
    """Gather the texts of each rank, whatever their lengths; used when a step is refused.

    `all_gather_object` would gather them on the current device.
    """
    own = json.dumps(list(texts)).encode()
    longest = max(length for (length,) in gather(group, model_device, torch.tensor([len(own)])))
    own = own.ljust(-(-longest // 8) * 8)  # JSON may end in spaces
    rows = gather(group, model_device, torch.frombuffer(bytearray(own), dtype=torch.int64))
    return [json.loads(array("q", row).tobytes()) for row in rows]


def gather(group: dist.ProcessGroup, model_device: torch.device, *tensors: Tensor) -> list[list[int]]:
    """Gather int64 tensors ``(n,)``, concatenated, as a list of numbers for each rank."""
    device = report_device(group, model_device)
    own = torch.cat([tensor.to(device) for tensor in tensors])
    gathered = torch.empty(group.size() * len(own), dtype=torch.int64, device=device)
    all_gather(gathered, own, group=group)
    rows: list[list[int]] = gathered.view(group.size(), -1).tolist()
    return rows


def maxima(group: dist.ProcessGroup, model_device: torch.device, values: Tensor) -> Tensor:
    """Return the largest of all ranks' values, for each position; all ranks must have agreed on their number."""
    largest = values.to(report_device(group, model_device), copy=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def report_device(group: dist.ProcessGroup, model_device: torch.device) -> torch.device:
    """Return the device to gather reports on: `model_device` if the group has a backend for its type.

    The type depends only on what all ranks share, so that all use the same backend. The index matters because scripts
    may never set the current device: without it all ranks would use the first one.
    """
    types = [device.type for device in map(torch.device, group._device_types)]
    return model_device if model_device.type in types else torch.device(types[0])


def pack_bits(bits: Sequence[bool]) -> list[int]:
    """Return the bits as non-negative int64 numbers."""
    return [
        sum(1 << position for position, bit in enumerate(bits[start : start + _BITS]) if bit)
        for start in range(0, len(bits), _BITS)
    ]


def unpack_bits(numbers: Sequence[int], count: int) -> list[bool]:
    """Return the `count` bits that `pack_bits` has put into numbers."""
    return [bool(numbers[i // _BITS] >> (i % _BITS) & 1) for i in range(count)]
