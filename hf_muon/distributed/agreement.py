"""What ranks say to one another before a step, so that they all take it or all refuse it.

Nothing of variable length is sent before all ranks have agreed on its length: a step begins with `exchange_words`, five
numbers of each rank, and is over with them unless something is wrong or a gradient is missing somewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_BITS = 62  # in an int64, clear of its sign
# torch 2.13 gave it a new name and deprecates the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class RankReport:
    """What one rank says.

    Attributes:
        fingerprint: of options and layouts; must be the same on all ranks.
        gradients: a fingerprint of which parameters have a gradient, and of how these are stored.
        complains: whether it has complaints of its own.
        flags: two numbers from the device.
    """

    fingerprint: int
    gradients: int
    complains: bool
    flags: tuple[int, ...]


def exchange_words(
    group: dist.ProcessGroup, home: torch.device, fingerprint: int, gradients: int, complains: bool, flags: Tensor
) -> list[RankReport]:
    """Return what each rank of the group says, in the order of its ranks; one collective and one read of the device.

    Args:
        group: the ranks that talk.
        home: where the parameters are; of the same type on all ranks.
        fingerprint: at most 62 bits.
        gradients: at most 62 bits.
        complains: whether this rank has complaints.
        flags: ``(2,)``, int64, still on the device.
    """
    words = torch.tensor([fingerprint, gradients, int(complains)], dtype=torch.int64)
    return [RankReport(row[2], row[3], bool(row[4]), tuple(row[:2])) for row in gather(group, home, flags, words)]


def exchange_bits(group: dist.ProcessGroup, home: torch.device, bits: Sequence[bool]) -> list[list[bool]]:
    """Return the bits of each rank, after all of them have agreed on how many there are."""
    rows = gather(group, home, torch.tensor(packed(bits), dtype=torch.int64))
    return [unpacked(row, len(bits)) for row in rows]


def exchange_texts(group: dist.ProcessGroup, texts: Sequence[str]) -> list[list[str]]:
    """Return the texts of each rank, whatever their lengths; for the path on which a step is refused."""
    heard: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(heard, list(texts), group=group)
    return heard


def gather(group: dist.ProcessGroup, home: torch.device, *parts: Tensor) -> list[list[int]]:
    """Return the numbers of each rank."""
    device = talking_device(group, home)
    mine = torch.cat([part.to(device) for part in parts])
    heard = torch.empty(group.size() * len(mine), dtype=torch.int64, device=device)
    _all_gather(heard, mine, group=group)
    rows: list[list[int]] = heard.view(group.size(), -1).tolist()
    return rows


def talking_device(group: dist.ProcessGroup, home: torch.device) -> torch.device:
    """Return the device over which this rank talks: its parameters' own, where the group's backends serve its type.

    The type follows from what all ranks share, so that one backend serves all. Scripts may never have set the current
    device, so that without its index all ranks would take the first one.
    """
    types = [device.type for device in map(torch.device, group._device_types)]
    return home if home.type in types else torch.device(types[0])


def packed(bits: Sequence[bool]) -> list[int]:
    return [
        sum(1 << place for place, bit in enumerate(bits[start : start + _BITS]) if bit)
        for start in range(0, len(bits), _BITS)
    ]


def unpacked(numbers: Sequence[int], count: int) -> list[bool]:
    return [bool(numbers[i // _BITS] >> (i % _BITS) & 1) for i in range(count)]
