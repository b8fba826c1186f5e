"""One matrix, one owner: the executor for parameters that the ranks of a process group store together.

A matrix ``(m, n)`` lies on R ranks in boxes ``(rows, columns)``: shards, replicas, or slices of a flat partition. In a
step each rank first computes the updates of its own boxes. One `all_to_all_single` of a flat tensor, the boxes in the
order of their owners, brings every box to its matrix's owner (of replicas, one rank sends). The owner copies the boxes
into a batch ``(B, m, n)``, orthogonalizes it, and copies the boxes out of the directions ``(B, m, n)`` in the order of
the ranks that store them. A second `all_to_all_single` takes these back, and each rank applies them to its own boxes.
Where all ranks store whole matrices (DDP), these are copied to all ranks, and an owner holds its directions once.
Matrices whose owner stores all of them do not travel. With N elements of b bytes on S shards, each rank sends
``2 (S - 1) / S^2 * N * b`` bytes, the minimum if one rank owns a matrix.

A bucket of units travels in these two collectives. Rounds are pipelined in three phases: while one round is
orthogonalized, the updates of the next one travel to their owners and the directions of the last one travel back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.distributed.executor import (
    AroundRule,
    Directions,
    NewtonSchulz,
    Observer,
    OwnerRule,
    Piece,
    StepCost,
    UpdatesOf,
    directions_of,
)
from hf_muon.distributed.holdings import BatchBox, Holdings
from hf_muon.distributed.schedule import Bucket, OwnedUnit, Round, Schedule
from hf_muon.distributed.transfers import Copied, Exchanged, Transfer
from hf_muon.distributed.units import Unit, assign_owners


class Exchange:
    """Executor for parameters of which each rank of a group stores some elements, or all.

    Owners, rounds and buckets are computed once, by the same arithmetic on every rank. A round of matrices so large
    that it exceeds the bound is not pipelined, and travels in several buckets.

    Args:
        group: the process group.
        units: matrices to orthogonalize together.
        holdings: who stores what.
        comm_dtype: dtype in which updates travel. Directions travel in the dtype in which Newton-Schulz returns them,
            which loses nothing, or in `comm_dtype` if that is shorter.
        device: on which matrices are orthogonalized. Updates may come from another device (offload); directions stay
            on this one.
        comm_device: on which data travels: `device`, or an accelerator if the group has no backend for `device`.
        max_bucket_bytes: bound on the bytes in flight on a rank, in both directions. In addition an owner holds at
            least one unit, which is one matrix, or small ones: up to 16 MiB on a CPU, and 0.6 of `max_batch_bytes`
            on an accelerator.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        units: Sequence[Unit],
        holdings: Holdings,
        comm_dtype: torch.dtype,
        device: torch.device,
        comm_device: torch.device,
        max_bucket_bytes: int,
    ) -> None:
        self.group = group
        self.device = device
        self.comm_dtype = comm_dtype
        self.comm_device = comm_device
        self.max_bucket_bytes = max_bucket_bytes
        self.observer: Observer | None = None
        self.around: AroundRule | None = None
        self.rule: OwnerRule | None = None
        owners = assign_owners(units, holdings.ranks, [holdings.pattern(unit).holders for unit in units])
        owned = [OwnedUnit(unit, owner) for unit, owner in zip(units, owners, strict=True)]
        self.schedule = Schedule(owned, holdings, dist.get_rank(group), comm_dtype, max_bucket_bytes)
        self._planned: tuple[frozenset[int], list[Round]] = (frozenset(), [])

    def directions(self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz) -> Directions:
        """Yield pieces and their directions, bucket by bucket; see `Executor`.

        Raises:
            RuntimeError: from torch.distributed, when a rank is lost.
        """

        def flat_of(bucket: Bucket) -> Tensor:
            return self._outgoing(bucket, updates_of)

        return self._in_rounds(self.rounds(frozenset(active)), flat_of, newton_schulz)

    def _in_rounds(
        self, rounds: Sequence[Round], flat_of: Callable[[Bucket], Tensor], newton_schulz: NewtonSchulz
    ) -> Directions:
        """Yield pieces and their directions; `flat_of` returns the updates that a bucket sends, and is called once."""
        gathering: Transfer | None = None
        returning: tuple[Round, Transfer] | None = None
        for k, current in enumerate(rounds):
            if len(current.buckets) > 1:
                yield from self._bucket_by_bucket(current, flat_of, newton_schulz)
                continue
            bucket = current.buckets[0]
            arriving = gathering or self._gather(bucket, flat_of)
            gathering = None
            following = rounds[k + 1] if k + 1 < len(rounds) else None
            if following is not None and len(following.buckets) == 1:
                in_flight = current.nbytes + following.nbytes + (returning[0].nbytes if returning else 0)
                if in_flight <= self.max_bucket_bytes:
                    gathering = self._gather(following.buckets[0], flat_of)
            (data,) = arriving.wait()
            del arriving
            data = self._orthogonalize(bucket, data, newton_schulz)
            leaving = self._return(bucket, data)
            del data
            if returning is not None:
                yield self._complete(returning[0].buckets[0], returning[1])
            returning = current, leaving
            if following is not None and gathering is None:
                yield self._complete(bucket, leaving)
                returning = None
        if returning is not None:
            yield self._complete(returning[0].buckets[0], returning[1])

    def order(self, active: Collection[int]) -> list[list[Piece]]:
        """Return the pieces of one bucket after the other, see `Executor`."""
        return [bucket.pieces for current in self.rounds(frozenset(active)) for bucket in current.buckets]

    def share(self, active: Collection[int], tensors_of: Callable[[Unit], list[Tensor]]) -> None:
        """Copy tensors of units from their owners to all ranks, see `Executor`, with one collective or a few."""
        rank, ranks = dist.get_rank(self.group), self.schedule.holdings.ranks
        tensors: list[list[Tensor]] = [[] for _ in range(ranks)]
        for unit, owner in self.schedule.owned:
            if (stepped := unit.only(active)).ranges:
                tensors[owner] += tensors_of(stepped)
        sizes = [sum(tensor.numel() for tensor in of_owner) for of_owner in tensors]
        if not any(sizes):
            return
        own = _flattened(tensors[rank], torch.float32).to(self.comm_device)
        for owner, part in enumerate(Copied(own, sizes, self.group).wait()):
            if owner != rank:
                flat = _split(part, [tensor.numel() for tensor in tensors[owner]])
                for tensor, new in zip(tensors[owner], flat, strict=True):
                    tensor.copy_(new.view(tensor.shape))

    def cost(self, flops_of: Callable[[Unit], int], direction_dtype: torch.dtype) -> StepCost:
        """Return what a step costs on each rank of the group; see `Executor`."""
        return self.schedule.cost(flops_of, direction_dtype)

    def rounds(self, active: frozenset[int]) -> list[Round]:
        """Return the rounds of a step, those of the last step if it had the same active matrices."""
        if self._planned[0] != active:
            self._planned = active, self.schedule.rounds(active)
        return self._planned[1]

    def _bucket_by_bucket(
        self, current: Round, flat_of: Callable[[Bucket], Tensor], newton_schulz: NewtonSchulz
    ) -> Directions:
        """Step a round of several buckets: gather them one by one, so that all owners then work at the same time."""
        data = [self._gather(bucket, flat_of).wait()[0] for bucket in current.buckets]
        for k, bucket in enumerate(current.buckets):
            data[k] = self._orthogonalize(bucket, data[k], newton_schulz)
        for k, bucket in enumerate(current.buckets):
            leaving = self._return(bucket, data[k])
            data[k] = data[k].new_empty(0)
            yield self._complete(bucket, leaving)

    def _outgoing(self, bucket: Bucket, updates_of: UpdatesOf) -> Tensor:
        """Return the updates of this rank's boxes, flat, ordered by owner."""
        updates = updates_of(bucket.pieces)
        device = self.comm_device if bucket.gathers else self.device
        return _flattened([updates[i] for i in bucket.outgoing], self.comm_dtype).to(device)

    def _gather(self, bucket: Bucket, flat_of: Callable[[Bucket], Tensor]) -> Transfer:
        """Start to send the updates of this rank's boxes to their owners."""
        return Exchanged(flat_of(bucket), bucket.send, bucket.receive, self.group, local=not bucket.gathers)

    def _orthogonalize(self, bucket: Bucket, received: Tensor, newton_schulz: NewtonSchulz) -> Tensor:
        """Return the directions of the units that this rank owns, flat, ordered by destination."""
        arrived: dict[int, list[tuple[BatchBox, Tensor]]] = {}
        received = received.to(self.device)
        flat = _split(received, [box.numel for _, box in bucket.incoming])
        for (k, box), data in zip(bucket.incoming, flat, strict=True):
            arrived.setdefault(k, []).append((box, data.view(box.shape)))
        dtype = min(newton_schulz.dtype, self.comm_dtype, key=lambda dtype: dtype.itemsize)
        if self.around is not None:  # whose directions are of any size
            dtype = self.comm_dtype
        send = received
        if not bucket.in_place or received.dtype != dtype:
            send = torch.empty(sum(bucket.leave), dtype=dtype, device=self.device)
        leaving: dict[int, list[tuple[BatchBox, Tensor]]] = {}
        flat = _split(send, [box.numel for _, box in bucket.returned])
        for (k, box), data in zip(bucket.returned, flat, strict=True):
            leaving.setdefault(k, []).append((box, data.view(box.shape)))
        for k, updates in arrived.items():
            unit = bucket.units[k].unit
            batch = torch.empty(unit.count, *unit.shape, dtype=self.comm_dtype, device=self.device)  # (B, m, n)
            for box, data in updates:
                box.write(data, batch)
            directions = directions_of(self, unit, batch, newton_schulz)
            for box, data in leaving[k]:
                box.read(directions, data)
        return send.to(self.comm_device) if bucket.returns else send

    def _return(self, bucket: Bucket, send: Tensor) -> Transfer:
        """Start to send directions back."""
        if bucket.to_all:
            return Copied(send, bucket.arrive, self.group)
        return Exchanged(send, bucket.leave, bucket.arrive, self.group, local=not bucket.returns)

    def _complete(self, bucket: Bucket, leaving: Transfer) -> tuple[list[Piece], list[Tensor]]:
        """Wait for the directions of this rank's boxes, and return them with their pieces."""
        pieces = [bucket.pieces[i] for i in bucket.completed]
        shapes = [bucket.shapes[i] for i in bucket.completed]
        flat = _unpacked(leaving.wait(), [math.prod(shape) for shape in shapes])
        return pieces, [direction.view(shape) for direction, shape in zip(flat, shapes, strict=True)]


def _flattened(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of all elements, in few launches whatever the number of tensors."""
    if not tensors:
        return torch.empty(0, dtype=dtype)
    flat = [tensor.reshape(-1) for tensor in tensors]
    if all(tensor.dtype == dtype for tensor in flat):
        return torch.cat(flat)
    together = torch.empty(sum(map(len, flat)), dtype=dtype, device=flat[0].device)
    torch._foreach_copy_(list(torch.split(together, list(map(len, flat)))), flat)
    return together


def _unpacked(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return tensors of these sizes, which lie one after the other in the parts, none of them in two."""
    rest = iter(sizes)
    unpacked: list[Tensor] = []
    for part in parts:
        own, missing = [], len(part)
        while missing > 0:
            own.append(next(rest))
            missing -= own[-1]
        unpacked += _split(part, own)
    return unpacked


def _split(flat: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return torch.split(flat, sizes) if sizes else ()
