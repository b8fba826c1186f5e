"""One matrix, one owner: updates travel to it, directions travel back, bucket by bucket, over one process group."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.distributed.executor import NewtonSchulz, Observer, Piece, UpdatesOf
from hf_muon.distributed.holdings import BatchBox, Holdings
from hf_muon.distributed.units import Unit, assign_owners


class _Transfer:
    """An all-to-all under way; keeps what it sends alive until it has arrived."""

    def __init__(
        self, send: Tensor, sizes: Sequence[int], expected: Sequence[int], group: dist.ProcessGroup, *, alone: bool
    ) -> None:
        self._work: dist.Work | None = None
        self._send: Tensor | None = None
        self._received = send
        if not alone:
            self._send = send
            self._received = torch.empty(sum(expected), dtype=send.dtype, device=send.device)
            self._work = dist.all_to_all_single(
                self._received, send, list(expected), list(sizes), group=group, async_op=True
            )

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._send = None
        return self._received


class _Bucket:
    """Units that travel together, with their owners, and what of this concerns one rank.

    Attributes:
        pieces: all that the rank stores of the units.
        outgoing: which of the pieces it sends, in the order of their destinations.
        send, receive: elements of updates to and from each rank.
        incoming: unit and block of the updates that arrive, in their order.
        returned: unit and block of the directions that it sends back, in the order of their destinations.
        leave, arrive: elements of directions to and from each rank.
        completed: which of the pieces the directions are for that arrive, in their order.
        mirrored: whether directions leave exactly as updates arrive, so that they can take their place.
    """

    def __init__(self, units: Sequence[tuple[Unit, int]], storage: Holdings, rank: int) -> None:
        ranks = storage.ranks
        self.units = units
        self.pieces: list[Piece] = []
        self.shapes: list[tuple[int, ...]] = []
        self.send, self.receive = [0] * ranks, [0] * ranks
        self.leave, self.arrive = [0] * ranks, [0] * ranks
        self.gathers = self.returns = False
        outgoing: list[list[int]] = [[] for _ in range(ranks)]
        completed: list[list[int]] = [[] for _ in range(ranks)]
        incoming: list[list[tuple[int, BatchBox]]] = [[] for _ in range(ranks)]
        returned: list[list[tuple[int, BatchBox]]] = [[] for _ in range(ranks)]
        for k, (unit, owner) in enumerate(units):
            pattern = storage.pattern(unit)
            self.gathers |= owner not in pattern.holders
            self.returns |= pattern.total > pattern.stored[owner]
            for block in storage.blocks(unit, rank):
                if storage.replicas(block.piece.matrix).sends(rank, owner):
                    outgoing[owner].append(len(self.pieces))
                    self.send[owner] += block.numel
                completed[owner].append(len(self.pieces))
                self.arrive[owner] += block.numel
                self.pieces.append(block.piece)
                self.shapes.append(block.stored)
            if owner != rank:
                continue
            for other in range(ranks):
                for block in storage.blocks(unit, other):
                    if storage.replicas(block.piece.matrix).sends(other, owner):
                        incoming[other].append((k, block))
                        self.receive[other] += block.numel
                    returned[other].append((k, block))
                    self.leave[other] += block.numel
        self.outgoing = [i for part in outgoing for i in part]
        self.completed = [i for part in completed for i in part]
        self.incoming = [item for part in incoming for item in part]
        self.returned = [item for part in returned for item in part]
        self.mirrored = self.incoming == self.returned


@dataclass(frozen=True)
class _Round:
    """Units that are orthogonalized at the same time, in the buckets in which they travel.

    Attributes:
        buckets: one, or several where one would be out of bounds.
        nbytes: what the round has in flight on a rank at most.
    """

    buckets: list[_Bucket]
    nbytes: int


class Exchange:
    """Executor for parameters of which each rank of a group stores a part, or all.

    Ownership, rounds and buckets are computed once, by the same arithmetic on every rank. In a round all owners work at
    the same time. Two collectives serve a bucket, one in each direction (none where nothing has to travel). While a
    round is orthogonalized, the next one is under way to its owners, and the last one's directions are on their way
    back. A round of matrices so large that it is out of bounds goes alone, in several buckets.

    Args:
        group: the process group.
        units: what to orthogonalize together.
        storage: who stores what.
        wire: dtype in which updates travel. Directions travel in the one that Newton-Schulz has computed them in, which
            loses nothing, or in this one if it is shorter.
        device: where matrices are orthogonalized. Updates may come from another one (offload), directions do not go
            back to it.
        carrier: what data travels on between ranks; the same, or an accelerator where the group carries no other.
        max_bucket_bytes: bound on what is in flight at once on a rank, in both directions. An owner holds at least one
            unit beside that, which is one matrix, or up to 16 MiB of small ones.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        units: Sequence[Unit],
        storage: Holdings,
        wire: torch.dtype,
        device: torch.device,
        carrier: torch.device,
        max_bucket_bytes: int,
    ) -> None:
        self.group = group
        self.carrier = carrier
        self.rank = dist.get_rank(group)
        self.storage = storage
        self.device = device
        self.observer: Observer | None = None
        self.wire = wire
        self.max_bucket_bytes = max_bucket_bytes
        owners = assign_owners(units, storage.ranks, [storage.pattern(unit).holders for unit in units])
        self.owned = list(zip(units, owners, strict=True))
        self._planned: tuple[frozenset[int], list[_Round]] = (frozenset(), [])

    def directions(
        self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> Iterator[tuple[list[Piece], list[Tensor]]]:
        """See `Executor`.

        Raises:
            RuntimeError: from torch.distributed, when a rank is lost.
        """
        rounds = self._rounds(frozenset(active))
        gathering: _Transfer | None = None
        returning: tuple[_Round, _Transfer] | None = None
        for k, current in enumerate(rounds):
            if len(current.buckets) > 1:
                yield from self._bucket_by_bucket(current, updates_of, newton_schulz)
                continue
            bucket = current.buckets[0]
            arriving = gathering or self._gather(bucket, updates_of)
            gathering = None
            following = rounds[k + 1] if k + 1 < len(rounds) else None
            if following is not None and len(following.buckets) == 1:
                in_flight = current.nbytes + following.nbytes + (returning[0].nbytes if returning else 0)
                if in_flight <= self.max_bucket_bytes:
                    gathering = self._gather(following.buckets[0], updates_of)
            held = arriving.wait()
            del arriving
            held = self._orthogonalize(bucket, held, newton_schulz)
            leaving = self._return(bucket, held)
            del held
            if returning is not None:
                yield self._complete(returning[0].buckets[0], returning[1])
            returning = current, leaving
            if following is not None and gathering is None:
                yield self._complete(bucket, leaving)
                returning = None
        if returning is not None:
            yield self._complete(returning[0].buckets[0], returning[1])

    def _bucket_by_bucket(
        self, current: _Round, updates_of: UpdatesOf, newton_schulz: NewtonSchulz
    ) -> Iterator[tuple[list[Piece], list[Tensor]]]:
        """A round that cannot travel at once: every owner waits until it has its own, and all work at the same time."""
        held = [self._gather(bucket, updates_of).wait() for bucket in current.buckets]
        for k, bucket in enumerate(current.buckets):
            held[k] = self._orthogonalize(bucket, held[k], newton_schulz)
        for k, bucket in enumerate(current.buckets):
            leaving = self._return(bucket, held[k])
            held[k] = held[k].new_empty(0)
            yield self._complete(bucket, leaving)

    def _rounds(self, active: frozenset[int]) -> list[_Round]:
        """The units of active parameters, cut so that three rounds, one in each phase, are within bounds.

        Each owner gets a unit in every round, whatever the bound: a round in which only some can work takes as long as
        one in which all do. It gets more as long as they are not more than the largest unit of another.
        """
        if self._planned[0] == active:
            return self._planned[1]
        queues: list[list[Unit]] = [[] for _ in range(self.storage.ranks)]
        for unit, owner in self.owned:
            kept = unit if active.issuperset(run.matrix for run in unit.runs) else unit.only(active)
            if kept.runs:
                queues[owner].append(kept)
        rounds: list[_Round] = []
        units: list[tuple[Unit, int]] = []
        nothing = torch.zeros(self.storage.ranks, dtype=torch.int64)
        in_flight, own, largest = nothing, [0] * self.storage.ranks, 0
        for owner, unit in _in_turn(queues):
            more = in_flight + self._nbytes(unit, owner)
            full = own[owner] + unit.numel > max(largest, unit.numel)
            if full and int(more.max()) > self.max_bucket_bytes // 3:
                rounds.append(self._round(units, int(in_flight.max())))
                units, own, largest = [], [0] * self.storage.ranks, 0
                more = nothing + self._nbytes(unit, owner)
            units.append((unit, owner))
            own[owner] += unit.numel
            largest = max(largest, unit.numel)
            in_flight = more
        if units:
            rounds.append(self._round(units, int(in_flight.max())))
        self._planned = active, rounds
        return rounds

    def _round(self, units: Sequence[tuple[Unit, int]], nbytes: int) -> _Round:
        """One bucket where all fits, else as many as the bound takes."""
        parts: list[list[tuple[Unit, int]]] = [[]]
        if nbytes > self.max_bucket_bytes // 3:
            under_way = torch.zeros(self.storage.ranks, dtype=torch.int64)
            for unit, owner in units:
                # fp32 updates and their copies to send, eight bytes in either dtype; directions that arrive are less.
                more = under_way + self.storage.pattern(unit).on_ranks * 8
                if parts[-1] and int(more.max()) > self.max_bucket_bytes:
                    parts.append([])
                    more = more - under_way
                parts[-1].append((unit, owner))
                under_way = more
        else:
            parts = [list(units)]
        return _Round([_Bucket(part, self.storage, self.rank) for part in parts], nbytes)

    def _nbytes(self, unit: Unit, owner: int) -> Tensor:
        """Bytes that a unit has in flight on each rank, updates and (fp32) directions, sent and received."""
        pattern = self.storage.pattern(unit)
        back = min(4, self.wire.itemsize)
        nbytes = pattern.on_ranks * (self.wire.itemsize + back)
        nbytes[owner] += unit.numel * self.wire.itemsize + pattern.total * back
        return nbytes

    def _gather(self, bucket: _Bucket, updates_of: UpdatesOf) -> _Transfer:
        updates = updates_of(bucket.pieces)
        parts = [updates[i].reshape(-1).to(self.wire) for i in bucket.outgoing]
        device = self.carrier if bucket.gathers else self.device
        send = torch.cat(parts).to(device) if parts else torch.empty(0, dtype=self.wire, device=device)
        del updates, parts  # before memory is taken for what arrives
        return _Transfer(send, bucket.send, bucket.receive, self.group, alone=not bucket.gathers)

    def _orthogonalize(self, bucket: _Bucket, received: Tensor, newton_schulz: NewtonSchulz) -> Tensor:
        """Orthogonalize the units that this rank owns: their directions, in the order of their destinations."""
        arrived: dict[int, list[tuple[BatchBox, Tensor]]] = {}
        received = received.to(self.device)
        parts = _cut(received, [block.numel for _, block in bucket.incoming])
        for (k, block), part in zip(bucket.incoming, parts, strict=True):
            arrived.setdefault(k, []).append((block, part.view(block.shape)))
        dtype = min(newton_schulz.dtype, self.wire, key=lambda dtype: dtype.itemsize)
        send = received
        if not bucket.mirrored or received.dtype != dtype:
            send = torch.empty(sum(bucket.leave), dtype=dtype, device=self.device)
        leaving: dict[int, list[tuple[BatchBox, Tensor]]] = {}
        parts = _cut(send, [block.numel for _, block in bucket.returned])
        for (k, block), part in zip(bucket.returned, parts, strict=True):
            leaving.setdefault(k, []).append((block, part.view(block.shape)))
        for k, found in arrived.items():
            unit = bucket.units[k][0]
            batch = torch.empty(unit.count, *unit.shape, dtype=self.wire, device=self.device)
            for block, data in found:
                block.write(data, batch)
            directions = newton_schulz(batch)
            if self.observer is not None:
                self.observer(unit, batch, directions)
            for block, data in leaving[k]:
                block.read(directions, data)
        return send.to(self.carrier) if bucket.returns else send

    def _return(self, bucket: _Bucket, send: Tensor) -> _Transfer:
        return _Transfer(send, bucket.leave, bucket.arrive, self.group, alone=not bucket.returns)

    def _complete(self, bucket: _Bucket, leaving: _Transfer) -> tuple[list[Piece], list[Tensor]]:
        pieces = [bucket.pieces[i] for i in bucket.completed]
        shapes = [bucket.shapes[i] for i in bucket.completed]
        received = leaving.wait()
        parts = _cut(received, [math.prod(shape) for shape in shapes])
        return pieces, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _cut(flat: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return torch.split(flat, sizes) if sizes else ()


def _in_turn(queues: Sequence[Sequence[Unit]]) -> Iterator[tuple[int, Unit]]:
    """The units of all owners, largest first, as they come up when all work at the same pace."""
    turns: list[tuple[int, int, int]] = []
    for owner, queue in enumerate(queues):
        begin = 0
        for place in sorted(range(len(queue)), key=lambda i: -queue[i].cost):
            turns.append((begin, owner, place))
            begin += queue[place].cost
    for _, owner, place in sorted(turns):
        yield owner, queues[owner][place]
