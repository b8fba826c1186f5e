"""What ranks tell one another before a step, so that they all take it or all refuse it."""

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
class Said:
    """What one rank says.

    Attributes:
        fingerprint: of options and layouts; must be the same on all ranks.
        complains: whether it has complaints of its own.
        flags: numbers from the device.
        bits: one for each parameter.
    """

    fingerprint: int
    complains: bool
    flags: tuple[int, ...]
    bits: tuple[bool, ...]


def root_group(groups: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group in which all the others lie, or all ranks where there is none."""
    largest = max(groups, key=lambda group: group.size())
    members = set(dist.get_process_group_ranks(largest))
    if all(members.issuperset(dist.get_process_group_ranks(group)) for group in groups):
        return largest
    world = dist.group.WORLD
    assert world is not None
    return world


def exchange_words(
    group: dist.ProcessGroup, fingerprint: int, complains: bool, flags: Tensor, bits: Sequence[bool]
) -> list[Said]:
    """What each rank of the group says, in the order of its ranks; one small collective and one read of the device.

    Args:
        group: the ranks that talk.
        fingerprint: at most 62 bits.
        complains: whether this rank has complaints.
        flags: ``(k,)``, int64, still on the device.
        bits: one for each parameter.
    """
    packed = [
        sum(1 << place for place, bit in enumerate(bits[start : start + _BITS]) if bit)
        for start in range(0, len(bits), _BITS)
    ]
    device = _device_of(group, flags.device)
    words = torch.tensor([fingerprint, int(complains), *packed], dtype=torch.int64)
    mine = torch.cat([flags.to(device), words.to(device)])
    heard = torch.empty(group.size() * len(mine), dtype=torch.int64, device=device)
    _all_gather(heard, mine, group=group)
    return [_said(row, len(flags), len(bits)) for row in heard.view(group.size(), -1).tolist()]


def _said(row: Sequence[int], flags: int, bits: int) -> Said:
    fingerprint, complains, *packed = row[flags:]
    unpacked = tuple(bool(packed[i // _BITS] >> (i % _BITS) & 1) for i in range(bits))
    return Said(fingerprint, bool(complains), tuple(row[:flags]), unpacked)


def exchange_texts(group: dist.ProcessGroup, texts: Sequence[str]) -> list[list[str]]:
    """The texts of each rank; for the path on which a step is refused."""
    heard: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(heard, list(texts), group=group)
    return heard


def _device_of(group: dist.ProcessGroup, wanted: torch.device) -> torch.device:
    """The wanted device, or one for which the group has a backend."""
    try:
        group._get_backend(torch.device(wanted.type))
    except RuntimeError:
        return torch.device(group._device_types[0])
    return wanted
