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
class Said:
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
) -> list[Said]:
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
    return [Said(row[2], row[3], bool(row[4]), tuple(row[:2])) for row in _gather(group, home, flags, words)]


def exchange_bits(group: dist.ProcessGroup, home: torch.device, bits: Sequence[bool]) -> list[list[bool]]:
    """Return the bits of each rank, after all of them have agreed on how many there are."""
    rows = _gather(group, home, torch.tensor(_packed(bits), dtype=torch.int64))
    return [_unpacked(row, len(bits)) for row in rows]


def exchange_texts(group: dist.ProcessGroup, texts: Sequence[str]) -> list[list[str]]:
    """Return the texts of each rank, whatever their lengths; for the path on which a step is refused."""
    heard: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(heard, list(texts), group=group)
    return heard


def _gather(group: dist.ProcessGroup, home: torch.device, *parts: Tensor) -> list[list[int]]:
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


def _packed(bits: Sequence[bool]) -> list[int]:
    return [
        sum(1 << place for place, bit in enumerate(bits[start : start + _BITS]) if bit)
        for start in range(0, len(bits), _BITS)
    ]


def _unpacked(numbers: Sequence[int], count: int) -> list[bool]:
    return [bool(numbers[i // _BITS] >> (i % _BITS) & 1) for i in range(count)]


# --- who talks

_roots: dict[tuple[str, ...], dist.ProcessGroup] = {}


def root_group(groups: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of all ranks that these groups connect, with one another and through the groups of others.

    Pipeline stages are not connected; data and tensor parallel groups of one stage are. Ranks outside take no part.
    All ranks of the groups must call this together the first time.
    """
    groups = sorted(set(groups), key=_order)
    for group in groups:
        if group.size() == dist.get_world_size():
            return group
    names = tuple(group.group_name for group in groups)
    if names not in _roots or not is_alive(_roots[names]):
        ranks, count = connected(groups)
        same = [group for group in groups if dist.get_process_group_ranks(group) == ranks]
        _roots[names] = same[0] if same else make_group(ranks, count)
    return _roots[names]


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group is of the present world; one of a destroyed world has no rank any more."""
    return group in dist.distributed_c10d._world.pg_map


def _order(group: dist.ProcessGroup) -> tuple[list[int], str]:
    """An order of groups that is the same on all ranks: collectives in this order cannot wait for one another."""
    return dist.get_process_group_ranks(group), group.group_name


def connected(groups: Sequence[dist.ProcessGroup]) -> tuple[list[int], int]:
    """Return the ranks that a rank's groups connect, directly or by chains of groups, and the most groups one is in.

    Every rank passes on which ranks it knows of, and whose groups are among what it knows. It knows all when these are
    the same ranks. A group is left when all of its members have said so, which they hear at the same time.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    known = [False] * world
    told = [other == rank for other in range(world)]
    for group in groups:
        for other in dist.get_process_group_ranks(group):
            known[other] = True
    count = len(dist.distributed_c10d._world.pg_names)
    talking = sorted(groups, key=_order)
    while talking:
        for group in list(talking):
            mine = torch.tensor([known == told, count, *_packed(known), *_packed(told)], dtype=torch.int64)
            heard = _gather(group, torch.device("cpu"), mine)
            for _, number, *packed in heard:
                words = len(packed) // 2
                known = [a or b for a, b in zip(known, _unpacked(packed[:words], world), strict=True)]
                told = [a or b for a, b in zip(told, _unpacked(packed[words:], world), strict=True)]
                count = max(count, number)
            if all(knows_all for knows_all, *_ in heard):
                talking.remove(group)
    return [other for other in range(world) if known[other]], count


def make_group(ranks: Sequence[int], count: int) -> dist.ProcessGroup:
    """Make a process group in which no other ranks take part.

    torch derives its name from the number of groups that a rank is in, and waits forever where this differs. Groups of
    a single rank make up for it.

    Args:
        ranks: of the new group, in order.
        count: the most groups that one of them is in.
    """
    while len(dist.distributed_c10d._world.pg_names) < count:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
