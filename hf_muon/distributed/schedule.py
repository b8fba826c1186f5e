"""When each unit travels: rounds, as plain data that is computed before anything is sent.

Every rank computes the same rounds. A round also holds what this rank sends and receives for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.distributed.holdings import Holdings
from hf_muon.distributed.pieces import Piece, StepCost
from hf_muon.distributed.units import Unit
from hf_muon.storage.boxes import Box

# An owner takes several units in a round as long as their updates are this part of `max_bucket_bytes`.
_SMALL = 64
# The directions that travel back together are at most this part of it. Two such parts travel at once.
_OF_RETURN = 8


class OwnedUnit(NamedTuple):
    """A unit and the rank that orthogonalizes it."""

    unit: Unit
    owner: int


@dataclass(frozen=True, eq=False)
class Return:
    """Units of a round whose directions travel back together, and this rank's share in the collective.

    Attributes:
        leave, arrive: elements of directions to and from each rank.
        travels: whether any rank sends directions to another one.
        to_all: whether all ranks store all of the units, so that directions are copied to all of them. What leaves is
            then this rank's own directions, once.
        boxes: position in the round's units and box of the directions that this rank sends, ordered by destination.
            Boxes that can be copied together are one.
        pieces: those of this rank, in the order in which their directions arrive.
        shapes: of the pieces in storage.
    """

    leave: list[int]
    arrive: list[int]
    travels: bool
    to_all: bool
    boxes: list[tuple[int, Box]] = field(repr=False)
    pieces: list[Piece] = field(repr=False)
    shapes: list[tuple[int, ...]] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Round:
    """Units that are orthogonalized at the same time, and this rank's share in the collective that gathers them.

    Attributes:
        units: with their owners.
        send, receive: elements of updates to and from each rank.
        gathers: whether any rank sends updates to another one.
        sent: the pieces whose updates this rank sends, ordered by destination.
        unsent: its other pieces, of which another rank sends the update.
        incoming: position in `units` and box of the updates that arrive, in the order of arrival. Boxes that can be
            copied together are one.
        returns: how directions travel back.
        overlaps: whether the next round's updates may travel, and the directions of this round still do, while others
            are orthogonalized.
    """

    units: tuple[OwnedUnit, ...]
    send: list[int]
    receive: list[int]
    gathers: bool
    sent: list[Piece] = field(repr=False)
    unsent: list[Piece] = field(repr=False)
    incoming: list[tuple[int, Box]] = field(repr=False)
    returns: list[Return]
    overlaps: bool

    @property
    def pieces(self) -> list[Piece]:
        """All that this rank stores of the units, in the order in which its momentum moves."""
        return [*self.sent, *self.unsent]


def make_round(
    units: Sequence[OwnedUnit], parts: Sequence[Sequence[int]], holdings: Holdings, rank: int, *, overlaps: bool = True
) -> Round:
    """Return a round as one rank sees it.

    Args:
        units: with their owners.
        parts: positions of the units whose directions travel back together.
        holdings: who stores what.
        rank: of this process.
        overlaps: see `Round`.
    """
    ranks = holdings.ranks
    sent: list[list[Piece]] = [[] for _ in range(ranks)]
    unsent: list[Piece] = []
    incoming: list[list[tuple[int, Box]]] = [[] for _ in range(ranks)]
    send, receive = [0] * ranks, [0] * ranks
    for k, (unit, owner) in enumerate(units):
        for piece, box in holdings.boxes(unit, rank):
            if holdings.replicas(piece.matrix).sends(rank, owner):
                sent[owner].append(piece)
                send[owner] += box.numel
            else:
                unsent.append(piece)
        for other in range(ranks) if owner == rank else ():
            for piece, box in holdings.boxes(unit, other):
                if holdings.replicas(piece.matrix).sends(other, owner):
                    incoming[other].append((k, box))
                    receive[other] += box.numel
    return Round(
        units=tuple(units),
        send=send,
        receive=receive,
        gathers=any(owner not in holdings.pattern(unit).holders for unit, owner in units),
        sent=[piece for of_rank in sent for piece in of_rank],
        unsent=unsent,
        incoming=[item for of_rank in incoming for item in _joined(of_rank)],
        returns=[_make_return([(k, *units[k]) for k in part], holdings, rank) for part in parts],
        overlaps=overlaps,
    )


def _make_return(units: Sequence[tuple[int, Unit, int]], holdings: Holdings, rank: int) -> Return:
    """Return how the directions of some units, with their positions and owners, travel back."""
    ranks = holdings.ranks
    boxes: list[list[tuple[int, Box]]] = [[] for _ in range(ranks)]
    arriving: list[list[Piece]] = [[] for _ in range(ranks)]
    shapes: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    leave, arrive = [0] * ranks, [0] * ranks
    travels = False
    to_all = ranks > 1 and all(_is_everywhere(holdings, unit) for _, unit, _ in units)
    for k, unit, owner in units:
        pattern = holdings.pattern(unit)
        travels |= pattern.total > pattern.stored[owner]
        for piece, box in holdings.boxes(unit, rank):
            arriving[owner].append(piece)
            shapes[owner].append(box.stored)
            arrive[owner] += box.numel
        for other in range(ranks) if owner == rank else ():
            if to_all and other != rank:
                continue
            for _, box in holdings.boxes(unit, other):
                boxes[other].append((k, box))
                leave[other] += box.numel
    return Return(
        leave=leave,
        arrive=arrive,
        travels=travels,
        to_all=to_all,
        boxes=[item for of_rank in boxes for item in _joined(of_rank)],
        pieces=[piece for of_rank in arriving for piece in of_rank],
        shapes=[shape for of_rank in shapes for shape in of_rank],
    )


def _is_everywhere(holdings: Holdings, unit: Unit) -> bool:
    """Return whether every rank stores all of a unit."""
    return len(holdings.pattern(unit).holders) == holdings.ranks


def _leaving(holdings: Holdings, unit: Unit) -> int:
    """Return the elements of directions that a unit's owner holds to send."""
    return unit.numel if _is_everywhere(holdings, unit) else holdings.pattern(unit).total


def _joined(boxes: Sequence[tuple[int, Box]]) -> list[tuple[int, Box]]:
    """Join the boxes that a rank sends or receives, in the order in which they travel, as far as they can be."""
    joined: list[tuple[int, Box]] = []
    for k, box in boxes:
        together = joined[-1][1].joined(box) if joined and joined[-1][0] == k else None
        if together is None:
            joined.append((k, box))
        else:
            joined[-1] = k, together
    return joined


class _Sizes(NamedTuple):
    """What a round has in flight on the rank where it is most, in bytes.

    Attributes:
        gather: of updates, sent and received.
        back: of directions that travel back together.
        sent: elements of the updates that a rank sends.
    """

    gather: int
    back: int
    sent: int


class Schedule:
    """Assigns units to rounds.

    Args:
        owned: units with their owners.
        holdings: who stores what of them.
        rank: of this process.
        comm_dtype: dtype in which updates travel.
        max_bucket_bytes: bound on the bytes that travel at once.
        direction_bytes: of an element of the directions that Newton-Schulz returns, if it is not told otherwise.
        small: elements of the units that an owner takes together; None for a share of `max_bucket_bytes`.
    """

    def __init__(
        self,
        owned: Sequence[OwnedUnit],
        holdings: Holdings,
        rank: int,
        comm_dtype: torch.dtype,
        max_bucket_bytes: int,
        direction_bytes: int = 4,
        small: int | None = None,
    ) -> None:
        self.owned = owned
        self.holdings = holdings
        self.rank = rank
        self.comm_dtype = comm_dtype
        self.max_bucket_bytes = max_bucket_bytes
        self._small = max_bucket_bytes // _SMALL // comm_dtype.itemsize if small is None else small
        self._back = min(direction_bytes, comm_dtype.itemsize)

    def rounds(self, active: Collection[int]) -> list[Round]:
        """Return the rounds in which the units of the active matrices are orthogonalized."""
        planned = list(self._planned(active))
        return [
            make_round(units, parts, self.holdings, self.rank, overlaps=overlaps)
            for (units, parts, _), overlaps in zip(planned, self._overlaps(planned), strict=True)
        ]

    def _planned(self, active: Collection[int]) -> Iterator[tuple[list[OwnedUnit], list[list[int]], _Sizes]]:
        """Yield the units of each round, those whose directions travel back together, and what is in flight.

        Each owner gets a unit in every round, since a round in which only some owners work takes as long as one in
        which all do. It gets further units as long as they are together not larger than the largest unit of the round,
        or small.
        """
        ranks = self.holdings.ranks
        active = frozenset(active)
        queues: list[list[Unit]] = [[] for _ in range(ranks)]
        for unit, owner in self.owned:
            stepped = unit if active.issuperset(matrices.matrix for matrices in unit.ranges) else unit.only(active)
            if stepped.ranges:
                queues[owner].append(stepped)
        small = self._small
        units: list[OwnedUnit] = []
        own, most = [0] * ranks, small
        for owner, unit in _in_turn(queues):
            most = max(most, unit.numel)
            if own[owner] and own[owner] + unit.numel > most:
                yield self._sized(units)
                units, own, most = [], [0] * ranks, max(small, unit.numel)
            units.append(OwnedUnit(unit, owner))
            own[owner] += unit.numel
        if units:
            yield self._sized(units)

    def _sized(self, units: list[OwnedUnit]) -> tuple[list[OwnedUnit], list[list[int]], _Sizes]:
        """Return the units of a round, those whose directions travel back together, and what is in flight."""
        if self.holdings.ranks == 1:
            return units, [[*range(len(units))]], _Sizes(0, 0, 0)
        nothing = torch.zeros(self.holdings.ranks, dtype=torch.int64)
        sent, gathered, returned, largest = nothing, nothing.clone(), nothing, 0
        parts: list[list[int]] = [[]]
        for k, (unit, owner) in enumerate(units):
            pattern = self.holdings.pattern(unit)
            sent = sent + pattern.sent_to(owner)
            gathered[owner] += unit.numel
            back = pattern.on_ranks.clone()
            back[owner] += _leaving(self.holdings, unit)
            if parts[-1] and int((returned + back).max()) * self._back > self.max_bucket_bytes // _OF_RETURN:
                parts.append([])
                returned = nothing
            parts[-1].append(k)
            returned = returned + back
            largest = max(largest, int(returned.max()) * self._back)
        gather = int((sent + gathered).max()) * self.comm_dtype.itemsize
        return units, parts, _Sizes(gather, largest, int(sent.max()))

    def _overlaps(self, planned: Sequence[tuple[Any, Any, _Sizes]]) -> Iterator[bool]:
        """Yield for each round whether it overlaps with others: what then travels at once is within the bound."""
        sizes = [own for _, _, own in planned]
        for k, own in enumerate(sizes):
            before, after = sizes[max(0, k - 1)], sizes[min(len(sizes) - 1, k + 1)]
            yield after.gather + 2 * max(before.back, own.back) <= self.max_bucket_bytes

    def cost(self, flops_of: Callable[[Unit], int], direction_dtype: torch.dtype) -> StepCost:
        """Return what a step of all units costs; see `Exchange`."""
        ranks = self.holdings.ranks
        there = self.comm_dtype.itemsize
        back = min(there, direction_dtype.itemsize)
        flops, sent = [0] * ranks, [0] * ranks
        largest = 0
        # Many units lie on the ranks in the same way, and the ranks are many: multiply each pattern once.
        sent_of: Counter[Tensor] = Counter()
        for unit, owner in self.owned:
            pattern = self.holdings.pattern(unit)
            flops[owner] += flops_of(unit)
            # The owner sends the directions of what others store; `sent_to` counts its own update, which stays.
            own = pattern.stored[owner]
            sent[owner] += (pattern.total - own) * back - own * there
            largest = max(largest, there * unit.numel)
            sent_of[pattern.sent_to(owner)] += there
        planned = list(self._planned({matrices.matrix for unit, _ in self.owned for matrices in unit.ranges}))
        if ranks == 1:  # updates and directions, at four bytes: rounds are stepped one after the other
            together = (sum(unit.numel for unit, _ in units) for units, _, _ in planned)
            return StepCost(flops, [0], 0, 2 * 4 * max(together, default=0))
        sizes = [own for _, _, own in planned]
        overlaps = [*self._overlaps(planned)]
        ahead = [after.gather if overlap else 0 for after, overlap in zip(sizes[1:], overlaps, strict=False)] + [0]
        pairs = zip(sizes, ahead, strict=False)
        in_flight = max((own.gather + 2 * own.back + following for own, following in pairs), default=0)
        turn = max((own.sent for own in sizes), default=0)
        return StepCost(flops, _sum(sent, sent_of), in_flight, largest, turn)


def _sum(numbers: list[int], counts: Counter[Tensor]) -> list[int]:
    total = torch.tensor(numbers)
    for on_ranks, times in counts.items():
        total += on_ranks * times
    return [int(number) for number in total.tolist()]


def _in_turn(queues: Sequence[Sequence[Unit]]) -> Iterator[tuple[int, Unit]]:
    """Yield the units of all owners, largest first, in the order in which they start if all ranks are equally fast.

    Those of a process that is alone come in their own order.
    """
    if len(queues) == 1:
        yield from ((0, unit) for unit in queues[0])
        return
    turns: list[tuple[int, int, int]] = []
    for owner, queue in enumerate(queues):
        begin = 0
        for index in sorted(range(len(queue)), key=lambda i: -queue[i].cost):
            turns.append((begin, owner, index))
            begin += queue[index].cost
    for _, owner, index in sorted(turns):
        yield owner, queues[owner][index]
