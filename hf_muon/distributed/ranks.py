"""Messages between ranks before a step, so that all of them take it or all refuse it.

Ranks agree on the length of a message of variable length before they send it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.math.torch_private import device_types

# In an int64, clear of its sign.
_BITS = 62
# torch 2.13 renamed it and deprecates the old name.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Ranks:
    """The ranks of a process group, which must call each method together. A process without others is a group of one.

    Args:
        group: the process group; None for this process only.
        model_device: the device of the parameters; of the same type on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, model_device: torch.device) -> None:
        self.group = group
        self._model_device = model_device

    @property
    def members(self) -> list[int]:
        """The global ranks of the group, in its order."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def numbers(self, report: Sequence[int], flags: Sequence[Tensor] = ()) -> list[list[int]]:
        """Gather flags and numbers of each rank: one collective, and one read of the device.

        Args:
            report: this rank's numbers, as many on all ranks.
            flags: 0-dim bool tensors, as many on all ranks, which may still be on the device.

        Returns:
            For each member its flags as 0 or 1, followed by its numbers.
        """
        if self.group is None:
            return [[*(int(bool(flag)) for flag in flags), *report]]
        rows: list[list[int]] = self._gathered(report, flags).tolist()
        return rows

    def _gathered(self, report: Sequence[int], flags: Sequence[Tensor]) -> Tensor:
        """Gather flags and numbers, a row for each rank, on the device on which they travel."""
        assert self.group is not None
        device = report_device(self.group, self._model_device)
        tensors = [
            *(flag.to(torch.int64).view(1) for flag in flags),
            torch.tensor(report, dtype=torch.int64, device="cpu"),
        ]
        row = torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])
        rows = torch.empty(self.group.size() * len(row), dtype=torch.int64, device=device)
        all_gather(rows, row, group=self.group)
        return rows.view(self.group.size(), -1)

    def bits(self, report: Sequence[bool]) -> dict[int, list[bool]]:
        """Gather the bits of each member, as many on all ranks."""
        rows = self.numbers(pack_bits(report))
        return {rank: unpack_bits(row, len(report)) for rank, row in zip(self.members, rows, strict=True)}

    def texts(self, report: Sequence[str]) -> dict[int, list[str]]:
        """Gather the texts of each member, whatever their number and lengths.

        `all_gather_object` would gather them on the current device.
        """
        text = json.dumps(list(report)).encode()
        longest = max(length for (length,) in self.numbers([len(text)]))
        # As int64 numbers, eight bytes each, padded with spaces, in which JSON may end.
        rows = self.numbers(array("q", text.ljust(-(-longest // 8) * 8)))
        return {rank: json.loads(array("q", row).tobytes()) for rank, row in zip(self.members, rows, strict=True)}

    def maxima(self, values: Tensor) -> Tensor:
        """Return the largest of all ranks' values, for each position; as many on all ranks."""
        if self.group is None:
            return values
        largest = values.to(report_device(self.group, self._model_device), copy=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest


def merged_texts(texts: Mapping[int, Sequence[str]]) -> list[str]:
    """Return each text once, followed by the ranks that sent it unless all ranks did."""
    origins: dict[str, list[int]] = {}
    for rank, lines in texts.items():
        for line in dict.fromkeys(lines):
            origins.setdefault(line, []).append(rank)
    return [line if len(of) == len(texts) else f"{line} [rank {listed(of)}]" for line, of in origins.items()]


def listed(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text."""
    return ", ".join(map(str, ranks))


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
