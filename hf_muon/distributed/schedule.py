"""Schedule units in rounds, as plain data that is computed before any communication.

Every rank computes the same rounds. A round also holds what this rank sends and receives.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from hf_muon.distributed.units import Piece, Unit, assign_owners
from hf_muon.math.elementwise import is_accelerator, most_elements
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.storage.boxes import Box

# For the default of `max_batch_bytes`: enough for two rounds of the largest batches of an accelerator, some 90 million
# elements. With less, they would not overlap.
_BYTES_UNDER_WAY = 2**31
# An owner takes several units in a round as long as their updates are at most 1/64 of the bound, by default 32 MiB.
_SMALL_DIVISOR = 64
# The directions that travel back together are at most 1/8 of it, and two such parts travel at once: where all ranks
# need all directions (DDP), a rank then holds at most a quarter of the bound, not those of all owners.
_RETURN_DIVISOR = 8


@dataclass(frozen=True, eq=False)
class WayBack:
    """Units of a round whose directions travel back together, and this rank's share in the collective.

    Attributes:
        leave, arrive: elements of directions to and from each rank.
        travels: whether any rank sends directions to another one.
        to_all: whether all ranks store all of the units, so that directions are copied to all of them. What leaves is
            then this rank's own directions, once.
        boxes: position in the round's units and box of the directions that this rank sends, ordered by destination.
            Boxes that can be copied together are one.
        pieces: those of this rank, in the order in which their directions arrive.
    """

    leave: list[int]
    arrive: list[int]
    travels: bool
    to_all: bool
    boxes: list[tuple[int, Box]] = field(repr=False)
    pieces: list[Piece] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Round:
    """Units that are orthogonalized at the same time, and this rank's share in the collective that gathers them.

    Attributes:
        units: the batches.
        send, receive: elements of updates to and from each rank.
        gathers: whether any rank sends updates to another one.
        sent: the pieces whose updates this rank sends, ordered by destination.
        unsent: the other pieces of this rank, whose updates another rank sends.
        incoming: position in `units` and box of the updates that arrive, in the order of arrival. Boxes that can be
            copied together are one.
        ways_back: how directions travel back.
        overlaps: whether the next round's updates may travel, and the directions of this round still do, while others
            are orthogonalized.
    """

    units: tuple[Unit, ...]
    send: list[int]
    receive: list[int]
    gathers: bool
    sent: list[Piece] = field(repr=False)
    unsent: list[Piece] = field(repr=False)
    incoming: list[tuple[int, Box]] = field(repr=False)
    ways_back: list[WayBack]
    overlaps: bool


def make_round(
    units: Sequence[Unit], returned: Sequence[Sequence[int]], rank: int, ranks: int, *, overlaps: bool = True
) -> Round:
    """Return a round as one rank sees it.

    Args:
        units: the batches of the round.
        returned: for each `WayBack`, the positions of its units.
        rank: this process in the group.
        ranks: number of ranks.
        overlaps: as in `Round`.
    """
    sent: list[list[Piece]] = [[] for _ in range(ranks)]
    unsent: list[Piece] = []
    incoming: list[list[tuple[int, Box]]] = [[] for _ in range(ranks)]
    send, receive = [0] * ranks, [0] * ranks
    # Sender and owner list the same boxes in the same order: those that `Unit.boxes` yields for the sender.
    for k, unit in enumerate(units):
        for piece, box, sends in unit.boxes(rank):
            (sent[unit.owner] if sends else unsent).append(piece)
            send[unit.owner] += box.numel * sends
        for other in range(ranks) if unit.owner == rank else ():
            for _, box, sends in unit.boxes(other):
                if sends:
                    incoming[other].append((k, box))
                    receive[other] += box.numel
    return Round(
        units=tuple(units),
        send=send,
        receive=receive,
        gathers=any(unit.owner not in unit.holders for unit in units),
        sent=[piece for of_rank in sent for piece in of_rank],
        unsent=unsent,
        incoming=[item for of_rank in incoming for item in _joined(of_rank)],
        ways_back=[_make_way_back({k: units[k] for k in positions}, rank, ranks) for positions in returned],
        overlaps=overlaps,
    )


def _make_way_back(units: Mapping[int, Unit], rank: int, ranks: int) -> WayBack:
    """Return how the directions of some units, by their positions, travel back."""
    boxes: list[list[tuple[int, Box]]] = [[] for _ in range(ranks)]
    arriving: list[list[Piece]] = [[] for _ in range(ranks)]
    leave, arrive = [0] * ranks, [0] * ranks
    to_all = ranks > 1 and all(unit.is_everywhere for unit in units.values())
    for k, unit in units.items():
        for piece, box, _ in unit.boxes(rank):
            arriving[unit.owner].append(piece)
            arrive[unit.owner] += box.numel
        for other in range(ranks) if unit.owner == rank else ():
            # All get the same: the owner holds it once.
            if to_all and other != rank:
                continue
            for _, box, _ in unit.boxes(other):
                boxes[other].append((k, box))
                leave[other] += box.numel
    return WayBack(
        leave=leave,
        arrive=arrive,
        travels=any(sum(unit.stored) > unit.stored[unit.owner] for unit in units.values()),
        to_all=to_all,
        boxes=[item for of_rank in boxes for item in _joined(of_rank)],
        pieces=[piece for of_rank in arriving for piece in of_rank],
    )


def _joined(boxes: Sequence[tuple[int, Box]]) -> list[tuple[int, Box]]:
    """Join neighbouring boxes that a rank sends or receives, in the order in which they travel: each is one copy."""
    joined: list[tuple[int, Box]] = []
    for k, box in boxes:
        union = joined[-1][1].joined(box) if joined and joined[-1][0] == k else None
        if union is None:
            joined.append((k, box))
        else:
            joined[-1] = k, union
    return joined


class PlannedRound(NamedTuple):
    """Units of a round, and its bytes in flight, maximum over ranks.

    Attributes:
        units: the batches.
        returned: for each `WayBack`, the positions of its units.
        gather: bytes of updates, sent and received.
        back: bytes of directions that travel back together.
        sent: elements of the updates that a rank sends.
    """

    units: list[Unit]
    returned: list[list[int]]
    gather: int = 0
    back: int = 0
    sent: int = 0


class Schedule:
    """Assigns units to rounds.

    Args:
        units: with their owners.
        rank: this process in the group.
        ranks: number of ranks.
        comm_dtype: dtype in which updates travel.
        most_bytes: bound on the bytes that travel at once.
        small: elements of the units that an owner takes together; None for a share of `most_bytes`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        rank: int,
        ranks: int,
        comm_dtype: torch.dtype,
        most_bytes: int,
        small: int | None = None,
    ) -> None:
        self.units = units
        self.rank = rank
        self.ranks = ranks
        self.comm_dtype = comm_dtype
        self.most_bytes = most_bytes
        self._small = most_bytes // _SMALL_DIVISOR // comm_dtype.itemsize if small is None else small

    def rounds(self, active: Collection[int], direction_bytes: int) -> list[Round]:
        """Return the rounds in which the units of the active matrices are orthogonalized."""
        planned = self.planned(active, direction_bytes)
        return [
            make_round(each.units, each.returned, self.rank, self.ranks, overlaps=overlaps)
            for each, overlaps in zip(planned, self.overlaps(planned), strict=True)
        ]

    def planned(self, active: Collection[int], direction_bytes: int) -> list[PlannedRound]:
        """Return the rounds, the same on all ranks.

        Each owner gets a unit in every round, since a round in which only some owners work takes as long as one in
        which all do. It gets further units as long as they are together not larger than the largest unit of the round,
        or small.

        Args:
            active: positions of the matrices to step.
            direction_bytes: size of an element of the directions that travel back; it does not change the rounds, but
                which directions travel together, and which rounds overlap.
        """
        active = frozenset(active)
        queues: list[list[Unit]] = [[] for _ in range(self.ranks)]
        for unit in self.units:
            if (stepped := unit.only(active)).ranges:
                queues[unit.owner].append(stepped)
        planned: list[PlannedRound] = []
        units: list[Unit] = []
        elements, most = [0] * self.ranks, self._small
        for unit in _in_turn(queues):
            most = max(most, unit.numel)
            if elements[unit.owner] and elements[unit.owner] + unit.numel > most:
                planned.append(self._sized(units, direction_bytes))
                units, elements, most = [], [0] * self.ranks, max(self._small, unit.numel)
            units.append(unit)
            elements[unit.owner] += unit.numel
        return [*planned, self._sized(units, direction_bytes)] if units else planned

    def _sized(self, units: list[Unit], direction_bytes: int) -> PlannedRound:
        if self.ranks == 1:
            return PlannedRound(units, [[*range(len(units))]])
        # Elements of each rank. What travels is in two places at once: where it is sent from and where it arrives.
        nothing = [0] * self.ranks
        sent, gathered, on_way, largest = nothing, nothing.copy(), nothing, 0
        returned: list[list[int]] = [[]]
        for k, unit in enumerate(units):
            sent = _sum(sent, unit.sent())
            gathered[unit.owner] += unit.numel
            back = unit.stored.copy()
            # An owner sends a copy to each rank, or for all ranks one.
            back[unit.owner] += unit.numel if unit.is_everywhere else sum(unit.stored)
            longer = _sum(on_way, back)
            if returned[-1] and max(longer) * direction_bytes > self.most_bytes // _RETURN_DIVISOR:
                returned.append([])
                longer = back
            returned[-1].append(k)
            on_way = longer
            largest = max(largest, max(on_way) * direction_bytes)
        gather = max(_sum(sent, gathered)) * self.comm_dtype.itemsize
        return PlannedRound(units, returned, gather, largest, max(sent))

    def overlaps(self, planned: Sequence[PlannedRound]) -> list[bool]:
        """Return for each round whether it overlaps with others: what then travels at once is within the bound."""
        # Two ways back at once are in the same round, or in this one and the one before.
        return [
            after.gather + 2 * max(before.back, current.back) <= self.most_bytes
            for before, current, after in zip(
                [*planned[:1], *planned], planned, [*planned[1:], *planned[-1:]], strict=False
            )
        ]


def schedule_of(
    units: Sequence[Unit],
    rank: int,
    ranks: int,
    comm_dtype: torch.dtype,
    device: torch.device,
    max_batch_bytes: int = MAX_BATCH_BYTES,
) -> Schedule:
    """Return the schedule of units, with their owners. Ranks are numbers: no process group is asked.

    Args:
        units: matrices to orthogonalize together.
        rank: one of the ranks, whose share in each round the schedule holds.
        ranks: number of ranks.
        comm_dtype: dtype in which updates travel.
        device: where matrices are orthogonalized.
        max_batch_bytes: bound on the memory of what an accelerator orthogonalizes at once. What travels at once on a
            rank is bounded in proportion.
    """
    owners = assign_owners(units, ranks, [unit.holders for unit in units])
    owned = [replace(unit, owner=owner) for unit, owner in zip(units, owners, strict=True)]
    most = max(1, _BYTES_UNDER_WAY * max_batch_bytes // MAX_BATCH_BYTES)
    return Schedule(
        owned, rank, ranks, comm_dtype, most, _elements_alone(device, max_batch_bytes) if ranks == 1 else None
    )


def _elements_alone(device: torch.device, max_batch_bytes: int) -> int:
    """Return how many elements to step together without other ranks: on accelerators many, for few launches."""
    if not is_accelerator(device):
        return 0
    # First updates in fp32 and copies of small tensors; then the updates and directions of two bytes, 6 an element.
    return min(most_elements(max_batch_bytes), max_batch_bytes // 6)


def _sum(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return list(map(operator.add, first, second))


def _in_turn(queues: Sequence[Sequence[Unit]]) -> Iterator[Unit]:
    """Yield the units of all owners, largest first, in the order in which they start if all ranks are equally fast.

    Without other ranks, units keep their order.
    """
    if len(queues) == 1:
        yield from queues[0]
        return
    turns: list[tuple[int, int, int]] = []
    for owner, queue in enumerate(queues):
        begin = 0
        for index in sorted(range(len(queue)), key=lambda i: -queue[i].cost):
            turns.append((begin, owner, index))
            begin += queue[index].cost
    for _, owner, index in sorted(turns):
        yield queues[owner][index]
