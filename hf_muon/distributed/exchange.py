"""Assemble each matrix on one owner rank, orthogonalize it there, and distribute the direction.

A matrix ``(m, n)`` lies on R ranks in boxes ``(rows, columns)``: shards, replicas, or slices of a flat partition. In a
step each rank first computes the updates of its own boxes. One `all_to_all_single` of a flat tensor, with the boxes in
the order of their owners, sends every box to the owner of its matrix (of replicas, one rank sends). The owner copies
the boxes into a batch ``(B, m, n)``, orthogonalizes it, and copies the boxes out of the directions ``(B, m, n)`` in the
order of the ranks that store them. A second `all_to_all_single` returns these, and each rank applies them to its own
boxes. Where all ranks store whole matrices (DDP), the owner sends one copy of its directions to all ranks. Matrices
whose owner stores all of them do not travel. With N elements of b bytes on S shards, each rank sends ``2 (S - 1) / S^2
* N * b`` bytes, the minimum if one rank owns a matrix.

Units travel in rounds, in which every owner has one, or several small ones. While one round is orthogonalized, the
updates of the next one travel to their owners and the directions of the last one travel back. Without other ranks, a
process owns all of its matrices, which then do not travel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_muon.distributed.schedule import Round, WayBack, schedule_of
from hf_muon.distributed.transfers import Wait, connect, copied, exchanged
from hf_muon.distributed.units import Matrix, Piece, Unit, make_units
from hf_muon.math.elementwise import adjacent
from hf_muon.math.newton_schulz import MAX_BATCH_BYTES
from hf_muon.math.products import is_aligned
from hf_muon.storage.boxes import Box

_MOST_PLANS = 4
"""Sets of matrices whose rounds are kept, as of losses that alternate. At 512 ranks one may take seconds and 0.4 GB."""

Directions = Iterator[tuple[list[Piece], list[Tensor]]]
"""Pieces, and for each of them a direction of its shape."""


class UpdatesOf(Protocol):
    """Moves momentum, and computes updates."""

    def __call__(self, pieces: Sequence[Piece], moved_only: Sequence[Piece] = (), /) -> list[Tensor]:
        """Move the momentum of some pieces and return their updates in new memory, which may be overwritten.

        Args:
            pieces: those that move, and whose updates are returned, each of its `Box.stored` shape.
            moved_only: those that move, too; another rank sends their updates.
        """
        ...


class DirectionsOf(Protocol):
    """Orthogonalizes whole matrices, on their owner."""

    def __call__(self, unit: Unit, updates: Tensor, /) -> Tensor:
        """Return the directions of a unit ``(B, m, n)``.

        Args:
            unit: the matrices.
            updates: their updates ``(B, m, n)``, contiguous and aligned; they may be overwritten.
        """
        ...


class Exchange:
    """Assembles whole matrices from pieces, has them orthogonalized, and splits the directions into pieces again.

    Owners and rounds are computed once, by the same arithmetic on every rank.

    Args:
        group: the ranks that store the matrices; None for this process only.
        units: matrices to orthogonalize together.
        comm_dtype: dtype in which updates travel. Directions travel in the dtype of Newton-Schulz, or in `comm_dtype`
            if that is shorter: those of a rule, which are fp32, are rounded to it. So they are where nothing travels,
            too, and every layout has the same bits.
        device: where matrices are orthogonalized. Updates come from the host where parameters are stored there;
            directions stay on this device.
        max_batch_bytes: bound on the memory of what an accelerator orthogonalizes at once. What travels at once on a
            rank is bounded in proportion, by 2 GiB for the default: a round that exceeds it does not overlap with
            others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        units: Sequence[Unit],
        comm_dtype: torch.dtype,
        device: torch.device,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        self.group = group
        self.device = device
        self.comm_dtype = comm_dtype
        self.rank, ranks = (0, 1) if group is None else (dist.get_rank(group), group.size())
        self.schedule = schedule_of(units, self.rank, ranks, comm_dtype, device, max_batch_bytes)
        self._rounds = functools.lru_cache(_MOST_PLANS)(self.schedule.rounds)

    def directions(
        self, active: Collection[int], updates_of: UpdatesOf, directions_of: DirectionsOf, dtype: torch.dtype
    ) -> Directions:
        """Yield directions for this rank's pieces of the active matrices, as they return.

        Args:
            active: positions of the matrices to step; the same on all ranks.
            updates_of: called once for each piece of an active matrix.
            directions_of: called once for each unit that this rank owns.
            dtype: the dtype of the directions that it returns; the same on all ranks.

        Yields:
            Pieces, and for each of them a direction of its shape.

        Raises:
            RuntimeError: from torch.distributed, when a rank is lost.
        """
        dtype = min(dtype, self.comm_dtype, key=lambda dtype: dtype.itemsize)
        rounds = self._rounds(frozenset(active), dtype.itemsize)
        if any(each.gathers or any(way.travels and not way.to_all for way in each.ways_back) for each in rounds):
            connect(_several(self.group), self.device)
        gathering: Wait | None = None
        returning: tuple[WayBack, Wait] | None = None
        # While a round is orthogonalized, the updates of the next one and the directions of the last one are in flight.
        # Hence the order: start the next gather, wait for this one, orthogonalize, start to return, complete the return
        # before. Each `del` frees memory before the next tensor of its kind is made.
        for k, current in enumerate(rounds):
            following = rounds[k + 1] if k + 1 < len(rounds) else None
            arriving = gathering or self._gather(current, updates_of)
            gathering = None
            if following is not None and following.gathers and current.overlaps:
                gathering = self._gather(following, updates_of)
            (data,) = arriving()
            del arriving
            leaving = self._orthogonalize(current, data, directions_of, dtype)
            del data
            for way in current.ways_back:
                if not way.travels:
                    yield self._complete(way, self._return(way, leaving.pop(0)))
                    continue
                started = way, self._return(way, leaving.pop(0))
                if returning is not None:
                    yield self._complete(*returning)
                returning = started
                del started
            if returning is not None and not current.overlaps:
                yield self._complete(*returning)
                returning = None
        if returning is not None:
            yield self._complete(*returning)

    def share(self, active: Collection[int], tensors_of: Callable[[Unit], list[Tensor]]) -> None:
        """Copy tensors of units from their owners to all ranks, with one collective or a few.

        Args:
            active: positions of the matrices that have been stepped.
            tensors_of: returns the tensors of a unit, fp32, of the same shapes on all ranks; they are written to.
        """
        if self.group is None:
            return
        rank, ranks = self.rank, self.schedule.ranks
        tensors: list[list[Tensor]] = [[] for _ in range(ranks)]
        for unit in self.schedule.units:
            if (stepped := unit.only(active)).ranges:
                tensors[unit.owner] += tensors_of(stepped)
        sizes = [sum(tensor.numel() for tensor in of_owner) for of_owner in tensors]
        if not any(sizes):
            return
        flat = _flattened(tensors[rank], torch.float32).to(self.device)
        for owner, received in enumerate(copied(flat, sizes, self.group)()):
            if owner != rank:
                copies = _split(received, [tensor.numel() for tensor in tensors[owner]])
                for tensor, new in zip(tensors[owner], copies, strict=True):
                    tensor.copy_(new.view(tensor.shape))

    def _gather(self, current: Round, updates_of: UpdatesOf) -> Wait:
        """Move the momentum of this rank's pieces, and start to send their updates to their owners."""
        updates = updates_of(current.sent, current.unsent)
        flat = _flattened(updates, self.comm_dtype).to(self.device)
        del updates
        if not current.gathers:
            return lambda: [flat]
        return exchanged(flat, current.send, current.receive, _several(self.group))

    def _orthogonalize(
        self, current: Round, received: Tensor, directions_of: DirectionsOf, dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """Return the directions of the units that this rank owns, a list of flat tensors per `WayBack`, by destination.

        Those that stay on this rank are views of the directions if possible.

        Args:
            current: the round.
            received: the updates of its units, one flat tensor, as they have arrived; overwritten.
            directions_of: orthogonalizes ``(B, m, n)``.
            dtype: the dtype of what leaves.
        """
        arrived: dict[int, list[tuple[Box, Tensor]]] = {}
        flat = _split(received, [box.numel for _, box in current.incoming])
        for (k, box), data in zip(current.incoming, flat, strict=True):
            arrived.setdefault(k, []).append((box, data.view(box.shape)))
        leaving: list[list[Tensor]] = []
        slots: Sequence[Tensor | None]
        slots_of: dict[int, list[tuple[Box, Tensor | None, list[Tensor]]]] = {}
        for way in current.ways_back:
            send = torch.empty(sum(way.leave), dtype=dtype, device=self.device) if way.travels else None
            leaving.append([] if send is None else [send])
            sizes = [box.numel for _, box in way.boxes]
            slots = [None] * len(sizes) if send is None else _split(send, sizes)
            for (k, box), slot in zip(way.boxes, slots, strict=True):
                slots_of.setdefault(k, []).append((box, slot, leaving[-1]))
        for k, boxes in arrived.items():
            unit = current.units[k]
            directions = directions_of(unit, _batch_of(unit, boxes))  # (B, m, n)
            for box, slot, staying in slots_of[k]:
                if slot is None:
                    staying.append(box.in_batch(directions).to(dtype))
                else:
                    box.read(directions, slot.view(box.shape))
            # Their memory is free before the next ones are made.
            del directions
        return leaving

    def _return(self, way: WayBack, leaving: list[Tensor]) -> Wait:
        """Start to send directions back."""
        if not way.travels:
            return lambda: leaving
        send = leaving.pop()
        if way.to_all:
            return copied(send, way.arrive, _several(self.group))
        return exchanged(send, way.leave, way.arrive, _several(self.group))

    def _complete(self, way: WayBack, leaving: Wait) -> tuple[list[Piece], list[Tensor]]:
        """Wait for the directions of this rank's boxes, and return them with their pieces."""
        boxes = [piece.box for piece in way.pieces]
        flat = _unpacked(leaving(), [box.numel for box in boxes])
        return way.pieces, [direction.view(box.stored) for direction, box in zip(flat, boxes, strict=True)]


def _several(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "a process that is alone sends nothing"
    return group


def _batch_of(unit: Unit, boxes: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """Return the matrices of a unit ``(B, m, n)``, contiguous and aligned: where they arrived if they did so in order.

    Args:
        unit: the matrices.
        boxes: what has arrived, each box with its data of shape `Box.shape`.
    """
    first, data = boxes[0]
    rows, columns = unit.shape
    if first.numel == unit.numel and (first.rows, first.columns) == (((0, rows),), ((0, columns),)):
        # A kernel may add in another order where memory is not aligned: bits would depend on what else has arrived.
        return data if is_aligned(data) else data.clone()
    batch = data.new_empty(unit.count, *unit.shape)
    for box, data in boxes:
        box.write(data, batch)
    return batch


def _flattened(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of all elements, in a few launches for any number; a view if they are adjacent."""
    if not tensors:
        return torch.empty(0, dtype=dtype, device="cpu")
    if tensors[0].dtype == dtype and (merged := adjacent(tensors)) is not None:
        return merged
    flats = [tensor.reshape(-1) for tensor in tensors]
    if all(tensor.dtype == dtype for tensor in flats):
        return torch.cat(flats)
    # This copy converts. `cat` would first make one in the dtype of the updates.
    merged = torch.empty(sum(map(len, flats)), dtype=dtype, device=flats[0].device)
    torch._foreach_copy_(list(torch.split(merged, list(map(len, flats)))), flats)
    return merged


def _unpacked(flats: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return tensors of these sizes, which lie one after the other in flat tensors, none of them in two."""
    rest = iter(sizes)
    unpacked: list[Tensor] = []
    for flat in flats:
        contained, missing = [], len(flat)
        while missing > 0:
            contained.append(next(rest))
            missing -= contained[-1]
        unpacked += _split(flat, contained)
    return unpacked


def _split(flat: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return torch.split(flat, sizes) if sizes else ()


def exchanges_of(
    matrices: Sequence[Matrix], comm_dtype: torch.dtype | None = None, max_batch_bytes: int = MAX_BATCH_BYTES
) -> list[Exchange]:
    """Return exchanges that together serve the matrices of a param group.

    Args:
        matrices: all of the param group; units know them by their position.
        comm_dtype: dtype in which updates travel; None for their own.
        max_batch_bytes: see `Exchange`.
    """
    units_of: dict[tuple[dist.ProcessGroup | None, torch.device, torch.dtype], list[Unit]] = {
        matrix.exchange: [] for matrix in matrices
    }
    for unit in make_units(matrices, max_batch_bytes):
        units_of[matrices[unit.ranges[0].matrix].exchange].append(unit)
    # Without other ranks nothing travels, and updates stay as they are.
    return [
        Exchange(group, units, comm_dtype or dtype if group else dtype, device, max_batch_bytes)
        for (group, device, dtype), units in units_of.items()
    ]
