"""When each unit travels: rounds and buckets, as plain data that is computed before anything is sent.

Every rank computes the same rounds. A bucket also holds what this rank sends and receives for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_muon.distributed.executor import Piece, StepCost
from hf_muon.distributed.holdings import BatchBox, Holdings
from hf_muon.distributed.units import Unit


class OwnedUnit(NamedTuple):
    """A unit and the rank that orthogonalizes it."""

    unit: Unit
    owner: int


@dataclass(frozen=True, eq=False)
class Bucket:
    """Units that travel together, and this rank's share in the two collectives that serve them.

    Attributes:
        units: with their owners.
        send, receive: elements of updates to and from each rank.
        leave, arrive: elements of directions to and from each rank.
        gathers: whether any rank sends updates to another one.
        returns: whether any rank sends directions to another one.
        to_all: whether all ranks store all of the units, so that directions are copied to all of them. What leaves is
            then this rank's own directions, once.
        in_place: whether directions leave exactly as updates arrive, so that they can take over the memory.
        pieces: all that this rank stores of the units.
        shapes: of the pieces in storage.
        outgoing: positions in `pieces` of the updates that this rank sends, ordered by destination.
        incoming: position in `units` and box of the updates that arrive, in the order of arrival. Boxes that can be
            copied together are one.
        returned: the same of the directions that this rank sends back, ordered by destination.
        completed: positions in `pieces` of the directions that arrive, in the order of arrival.
    """

    units: tuple[OwnedUnit, ...]
    send: list[int]
    receive: list[int]
    leave: list[int]
    arrive: list[int]
    gathers: bool
    returns: bool
    to_all: bool
    in_place: bool
    pieces: list[Piece] = field(repr=False)
    shapes: list[tuple[int, ...]] = field(repr=False)
    outgoing: list[int] = field(repr=False)
    incoming: list[tuple[int, BatchBox]] = field(repr=False)
    returned: list[tuple[int, BatchBox]] = field(repr=False)
    completed: list[int] = field(repr=False)


@dataclass(frozen=True)
class Round:
    """Units that are orthogonalized at the same time.

    Attributes:
        buckets: in which they travel: one, or several if one would exceed the bound.
        nbytes: the most bytes that the round has in flight on any rank.
    """

    buckets: list[Bucket]
    nbytes: int


def make_bucket(units: Sequence[OwnedUnit], holdings: Holdings, rank: int) -> Bucket:
    """Return the bucket of some units as one rank sees it."""
    ranks = holdings.ranks
    gathers = returns = False
    pieces: list[Piece] = []
    shapes: list[tuple[int, ...]] = []
    outgoing: list[list[int]] = [[] for _ in range(ranks)]
    completed: list[list[int]] = [[] for _ in range(ranks)]
    incoming: list[list[tuple[int, BatchBox]]] = [[] for _ in range(ranks)]
    returned: list[list[tuple[int, BatchBox]]] = [[] for _ in range(ranks)]
    send, receive, leave, arrive = ([0] * ranks for _ in range(4))
    to_all = ranks > 1 and all(_is_everywhere(holdings, unit) for unit, _ in units)
    for k, (unit, owner) in enumerate(units):
        pattern = holdings.pattern(unit)
        gathers |= owner not in pattern.holders
        returns |= pattern.total > pattern.stored[owner]
        for box in holdings.boxes(unit, rank):
            if holdings.replicas(box.piece.matrix).sends(rank, owner):
                outgoing[owner].append(len(pieces))
                send[owner] += box.numel
            completed[owner].append(len(pieces))
            arrive[owner] += box.numel
            pieces.append(box.piece)
            shapes.append(box.stored)
        if owner != rank:
            continue
        for other in range(ranks):
            for box in holdings.boxes(unit, other):
                if holdings.replicas(box.piece.matrix).sends(other, owner):
                    incoming[other].append((k, box))
                    receive[other] += box.numel
                if not to_all or other == rank:
                    returned[other].append((k, box))
                    leave[other] += box.numel
    arriving = [item for of_rank in incoming for item in _joined(of_rank)]
    leaving = [item for of_rank in returned for item in _joined(of_rank)]
    return Bucket(
        units=tuple(units),
        send=send,
        receive=receive,
        leave=leave,
        arrive=arrive,
        gathers=gathers,
        returns=returns,
        to_all=to_all,
        in_place=arriving == leaving,
        pieces=pieces,
        shapes=shapes,
        outgoing=[i for of_rank in outgoing for i in of_rank],
        incoming=arriving,
        returned=leaving,
        completed=[i for of_rank in completed for i in of_rank],
    )


def _is_everywhere(holdings: Holdings, unit: Unit) -> bool:
    """Return whether every rank stores all of a unit."""
    return len(holdings.pattern(unit).holders) == holdings.ranks


def _leaving(holdings: Holdings, unit: Unit) -> int:
    """Return the elements of directions that a unit's owner holds to send."""
    return unit.numel if _is_everywhere(holdings, unit) else holdings.pattern(unit).total


def _joined(boxes: Sequence[tuple[int, BatchBox]]) -> list[tuple[int, BatchBox]]:
    """Join the boxes that a rank sends or receives, in the order in which they travel, as far as they can be."""
    joined: list[tuple[int, BatchBox]] = []
    for k, box in boxes:
        together = joined[-1][1].joined(box) if joined and joined[-1][0] == k else None
        if together is None:
            joined.append((k, box))
        else:
            joined[-1] = k, together
    return joined


class Schedule:
    """Cuts the units of an exchange into rounds.

    Args:
        owned: units and their owners, the same on all ranks.
        holdings: who stores what.
        rank: this one.
        comm_dtype: dtype in which updates travel.
        max_bucket_bytes: bound on the bytes that a rank has in flight, in both directions.
    """

    def __init__(
        self,
        owned: Sequence[OwnedUnit],
        holdings: Holdings,
        rank: int,
        comm_dtype: torch.dtype,
        max_bucket_bytes: int,
    ) -> None:
        self.owned = owned
        self.holdings = holdings
        self.rank = rank
        self.comm_dtype = comm_dtype
        self.max_bucket_bytes = max_bucket_bytes

    def rounds(self, active: frozenset[int]) -> list[Round]:
        """Return the rounds in which the units of the active matrices are orthogonalized.

        Three rounds, one in each phase, stay within the bound. Each owner gets a unit in every round, whatever the
        bound: a round in which only some owners work takes as long as one in which all do. An owner gets further units
        as long as they are together not larger than the largest unit of the round.
        """
        ranks = self.holdings.ranks
        queues: list[list[Unit]] = [[] for _ in range(ranks)]
        for unit, owner in self.owned:
            stepped = unit if active.issuperset(matrices.matrix for matrices in unit.ranges) else unit.only(active)
            if stepped.ranges:
                queues[owner].append(stepped)
        rounds: list[Round] = []
        units: list[OwnedUnit] = []
        nothing = torch.zeros(ranks, dtype=torch.int64)
        in_flight, own, largest = nothing, [0] * ranks, 0
        for owner, unit in _in_turn(queues):
            more = in_flight + self._nbytes(unit, owner)
            full = own[owner] + unit.numel > max(largest, unit.numel)
            if full and int(more.max()) > self.max_bucket_bytes // 3:
                rounds.append(self._round(units, int(in_flight.max())))
                units, own, largest = [], [0] * ranks, 0
                more = nothing + self._nbytes(unit, owner)
            units.append(OwnedUnit(unit, owner))
            own[owner] += unit.numel
            largest = max(largest, unit.numel)
            in_flight = more
        if units:
            rounds.append(self._round(units, int(in_flight.max())))
        return rounds

    def _round(self, units: Sequence[OwnedUnit], nbytes: int) -> Round:
        """Put the units into one bucket if they fit, and otherwise into several that fit one by one."""
        buckets: list[list[OwnedUnit]] = [[]]
        if nbytes > self.max_bucket_bytes // 3:
            in_flight = torch.zeros(self.holdings.ranks, dtype=torch.int64)
            for unit, owner in units:
                # fp32 updates and the copies to send take eight bytes in any comm_dtype; arriving directions take less.
                more = in_flight + self.holdings.pattern(unit).on_ranks * 8
                if buckets[-1] and int(more.max()) > self.max_bucket_bytes:
                    buckets.append([])
                    more = more - in_flight
                buckets[-1].append(OwnedUnit(unit, owner))
                in_flight = more
        else:
            buckets = [list(units)]
        return Round([make_bucket(bucket, self.holdings, self.rank) for bucket in buckets], nbytes)

    def _nbytes(self, unit: Unit, owner: int) -> Tensor:
        """Return the bytes of updates and (fp32) directions that a unit has in flight on each rank, ``(ranks,)``."""
        pattern = self.holdings.pattern(unit)
        back = min(4, self.comm_dtype.itemsize)
        nbytes = pattern.on_ranks * (self.comm_dtype.itemsize + back)
        nbytes[owner] += unit.numel * self.comm_dtype.itemsize + _leaving(self.holdings, unit) * back
        return nbytes

    def cost(self, flops_of: Callable[[Unit], int], direction_dtype: torch.dtype) -> StepCost:
        """Return what a step of all units costs; see `Executor`."""
        ranks = self.holdings.ranks
        there = self.comm_dtype.itemsize
        back = min(there, direction_dtype.itemsize)
        flops, sent, owned = [0] * ranks, [0] * ranks, [0] * ranks
        largest = 0
        # Many units lie on the ranks in the same way, and the ranks are many: multiply each pattern once.
        sent_of: Counter[Tensor] = Counter()
        stored_of: Counter[Tensor] = Counter()
        for unit, owner in self.owned:
            pattern = self.holdings.pattern(unit)
            flops[owner] += flops_of(unit)
            # The owner sends the directions of what others store; `sent_to` counts its own update, which stays.
            own = pattern.stored[owner]
            sent[owner] += (pattern.total - own) * back - own * there
            owned[owner] += unit.numel * there + _leaving(self.holdings, unit) * back
            largest = max(largest, there * unit.numel)
            sent_of[pattern.sent_to(owner)] += there
            stored_of[pattern.on_ranks] += there + back
        return StepCost(flops, _sum(sent, sent_of), max(_sum(owned, stored_of)), largest)


def _sum(numbers: list[int], counts: Counter[Tensor]) -> list[int]:
    total = torch.tensor(numbers)
    for on_ranks, times in counts.items():
        total += on_ranks * times
    return [int(number) for number in total.tolist()]


def _in_turn(queues: Sequence[Sequence[Unit]]) -> Iterator[tuple[int, Unit]]:
    """Yield the units of all owners, largest first, in the order in which they start if all ranks are equally fast."""
    turns: list[tuple[int, int, int]] = []
    for owner, queue in enumerate(queues):
        begin = 0
        for index in sorted(range(len(queue)), key=lambda i: -queue[i].cost):
            turns.append((begin, owner, index))
            begin += queue[index].cost
    for _, owner, index in sorted(turns):
        yield owner, queues[owner][index]
