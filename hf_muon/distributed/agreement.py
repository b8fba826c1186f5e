"""What ranks report to one another before a step, so that all of them take it or all refuse it.

Nothing of variable length is sent before all ranks have agreed on its length. A step begins with `exchange_reports`,
one collective of six numbers per rank; more follows only if something is wrong or a gradient is missing on some rank.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.math.compiler import Readiness
from hf_muon.math.torch_private import device_types

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
        readiness: whether it compiles elementwise functions.
        flags: two, see `gradients.flags`.
    """

    fingerprint: int
    gradients: int
    complains: bool
    readiness: Readiness
    flags: tuple[bool, ...]


def exchange_reports(
    group: dist.ProcessGroup,
    model_device: torch.device,
    fingerprint: int,
    gradients: int,
    complains: bool,
    readiness: Readiness,
    flags: Sequence[Tensor],
) -> list[RankReport]:
    """Return the reports of the group's ranks, in their order: one collective, and one read of the device.

    Args:
        group: of all ranks that take part in the step.
        model_device: of the parameters; of the same type on all ranks.
        fingerprint: at most 62 bits.
        gradients: at most 62 bits.
        complains: whether this rank has complaints.
        readiness: of this rank.
        flags: one or two, 0-dim, still on the device; a second one that is not there is true.
    """
    second = [1] * (2 - len(flags))
    numbers = torch.tensor([*second, fingerprint, gradients, int(complains), readiness], dtype=torch.int64)
    rows = gathered(group, model_device, *(flag.to(torch.int64).view(1) for flag in flags), numbers).tolist()
    return [RankReport(row[2], row[3], bool(row[4]), Readiness(row[5]), tuple(map(bool, row[:2]))) for row in rows]


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
    rows: list[list[int]] = gathered(group, model_device, *tensors).tolist()
    return rows


def gathered(group: dist.ProcessGroup, model_device: torch.device, *tensors: Tensor) -> Tensor:
    """Gather int64 tensors ``(n,)``, concatenated, as a row for each rank, on the device on which they travel."""
    device = report_device(group, model_device)
    own = torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])
    rows = torch.empty(group.size() * len(own), dtype=torch.int64, device=device)
    all_gather(rows, own, group=group)
    return rows.view(group.size(), -1)


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
    types = device_types(group)
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
