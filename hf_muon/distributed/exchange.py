"""One matrix, one owner: the executor for parameters that the ranks of a process group store together.

A matrix ``(m, n)`` lies on R ranks in boxes ``(rows, columns)``: shards, replicas, or slices of a flat partition. In a
step each rank first computes the updates of its own boxes. One `all_to_all_single` of a flat tensor, the boxes in the
order of their owners, brings every box to its matrix's owner (of replicas, one rank sends). The owner copies the boxes
into a batch ``(B, m, n)``, orthogonalizes it, and copies the boxes out of the directions ``(B, m, n)`` in the order of
the ranks that store them. A second `all_to_all_single` takes these back, and each rank applies them to its own boxes.
Where all ranks store whole matrices (DDP), these are copied to all ranks, and an owner holds its directions once.
Matrices whose owner stores all of them do not travel. With N elements of b bytes on S shards, each rank sends
``2 (S - 1) / S^2 * N * b`` bytes, the minimum if one rank owns a matrix.

Units travel in rounds, in which every owner has one, or small ones. While one round is orthogonalized, the updates of
the next one travel to their owners and the directions of the last one travel back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.distributed.executor import (
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
from hf_muon.distributed.schedule import OwnedUnit, Return, Round, Schedule
from hf_muon.distributed.transfers import Copied, Exchanged, Transfer, connect
from hf_muon.distributed.units import Unit, assign_owners
from hf_muon.math.elementwise import adjacent, is_accelerator
from hf_muon.math.products import is_aligned


class Exchange:
    """Executor for parameters of which each rank of a group stores some elements, or all.

    Owners and rounds are computed once, by the same arithmetic on every rank.

    Args:
        group: the process group.
        units: matrices to orthogonalize together.
        holdings: who stores what.
        comm_dtype: dtype in which updates travel. Directions travel in the dtype in which Newton-Schulz returns them,
            which loses nothing, or in `comm_dtype` if that is shorter.
        device: on which matrices are orthogonalized. Updates may come from another device (offload); directions stay
            on this one.
        comm_device: on which data travels: `device`, or an accelerator if the group has no backend for `device`.
        max_bucket_bytes: bound on the bytes that travel at once, on any rank. A round that exceeds it does not overlap
            with others. In addition an owner holds the unit that it orthogonalizes.
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
        self.rule: OwnerRule | None = None
        owners = assign_owners(units, holdings.ranks, [holdings.pattern(unit).holders for unit in units])
        owned = [OwnedUnit(unit, owner) for unit, owner in zip(units, owners, strict=True)]
        direction_bytes = 2 if is_accelerator(device) else 4
        self.schedule = Schedule(owned, holdings, dist.get_rank(group), comm_dtype, max_bucket_bytes, direction_bytes)
        self._planned: tuple[frozenset[int], list[Round]] = (frozenset(), [])

    def directions(self, active: Collection[int], updates_of: UpdatesOf, newton_schulz: NewtonSchulz) -> Directions:
        """Yield pieces and their directions, as they return; see `Executor`.

        While a round is orthogonalized, the updates of the next one travel to their owners, and the directions of the
        last one travel back.

        Raises:
            RuntimeError: from torch.distributed, when a rank is lost.
        """
        rounds = self.rounds(frozenset(active))
        if any(each.gathers or any(part.travels and not part.to_all for part in each.returns) for each in rounds):
            connect(self.group, self.comm_device)
        gathering: Transfer | None = None
        returning: tuple[Return, Transfer] | None = None
        for k, current in enumerate(rounds):
            following = rounds[k + 1] if k + 1 < len(rounds) else None
            arriving = gathering or self._gather(current, updates_of)
            gathering = None
            if following is not None and following.gathers and current.overlaps:
                gathering = self._gather(following, updates_of)
            (data,) = arriving.wait()
            del arriving
            leaving = self._orthogonalize(current, data, newton_schulz)
            del data
            for part in current.returns:
                started = part, self._return(part, leaving.pop(0))
                if returning is not None:
                    yield self._complete(*returning)
                returning = started
                del started
            if returning is not None and not current.overlaps:
                yield self._complete(*returning)
                returning = None
        if returning is not None:
            yield self._complete(*returning)

    def order(self, active: Collection[int]) -> list[list[Piece]]:
        """Return the pieces of one round after the other, see `Executor`."""
        return [current.pieces for current in self.rounds(frozenset(active))]

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

    def _gather(self, current: Round, updates_of: UpdatesOf) -> Transfer:
        """Move the momentum of this rank's pieces, and start to send their updates to their owners."""
        updates = updates_of(current.sent, current.unsent)
        flat = _flattened(updates, self.comm_dtype).to(self.comm_device if current.gathers else self.device)
        del updates
        return Exchanged(flat, current.send, current.receive, self.group, local=not current.gathers)

    def _orthogonalize(self, current: Round, received: Tensor, newton_schulz: NewtonSchulz) -> list[Tensor]:
        """Return the directions of the units that this rank owns: for each return, flat, ordered by destination.

        Args:
            current: the round.
            received: its updates, flat, as they have arrived; overwritten.
            newton_schulz: orthogonalizes.
        """
        arrived: dict[int, list[tuple[BatchBox, Tensor]]] = {}
        received = received.to(self.device)
        flat = _split(received, [box.numel for _, box in current.incoming])
        for (k, box), data in zip(current.incoming, flat, strict=True):
            arrived.setdefault(k, []).append((box, data.view(box.shape)))
        dtype = min(newton_schulz.dtype, self.comm_dtype, key=lambda dtype: dtype.itemsize)
        leaving = [torch.empty(sum(part.leave), dtype=dtype, device=self.device) for part in current.returns]
        places: dict[int, list[tuple[BatchBox, Tensor]]] = {}
        for part, send in zip(current.returns, leaving, strict=True):
            flat = _split(send, [box.numel for _, box in part.boxes])
            for (k, box), data in zip(part.boxes, flat, strict=True):
                places.setdefault(k, []).append((box, data.view(box.shape)))
        for k, boxes in arrived.items():
            unit = current.units[k].unit
            directions = directions_of(self, unit, _batch_of(unit, boxes), newton_schulz)
            for box, data in places[k]:
                box.read(directions, data)
            del directions  # before the next ones are made
        return leaving

    def _return(self, part: Return, send: Tensor) -> Transfer:
        """Start to send directions back."""
        if part.travels:
            send = send.to(self.comm_device)
        if part.to_all:
            return Copied(send, part.arrive, self.group)
        return Exchanged(send, part.leave, part.arrive, self.group, local=not part.travels)

    def _complete(self, part: Return, leaving: Transfer) -> tuple[list[Piece], list[Tensor]]:
        """Wait for the directions of this rank's boxes, and return them with their pieces."""
        flat = _unpacked(leaving.wait(), [math.prod(shape) for shape in part.shapes])
        return part.pieces, [direction.view(shape) for direction, shape in zip(flat, part.shapes, strict=True)]


def _batch_of(unit: Unit, boxes: Sequence[tuple[BatchBox, Tensor]]) -> Tensor:
    """Return the matrices of a unit ``(B, m, n)``, contiguous and aligned: where they arrived if they did so in order.

    Args:
        unit: the matrices.
        boxes: of them, with what has arrived.
    """
    first, data = boxes[0]
    rows, columns = unit.shape
    if first.numel == unit.numel and (first.rows, first.columns) == (((0, rows),), ((0, columns),)):
        return data if is_aligned(data) else data.clone()
    batch = data.new_empty(unit.count, *unit.shape)
    for box, data in boxes:
        box.write(data, batch)
    return batch


def _flattened(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of all elements, in few launches whatever the number of tensors; a view if they are one."""
    if not tensors:
        return torch.empty(0, dtype=dtype)
    if tensors[0].dtype == dtype and (together := adjacent(tensors)) is not None:
        return together
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
