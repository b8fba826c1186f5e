"""Flat partitions of DeepSpeed ZeRO, which replace the parameters in param groups: slices of parameters, end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_muon.storage.boxes import Shards, shards_of
from hf_muon.storage.regions import FlatRegion
from hf_muon.storage.views import WHOLE, View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Division(NamedTuple):
    """How the ranks' partitions divide one parameter, in a few numbers that are the same on all ranks.

    A flat tensor that holds the parameter is cut into equal parts, one for each rank.

    Attributes:
        numel: elements of the parameter.
        size: elements of a part.
        offset: where the parameter begins in the flat tensor.
        start: where the part begins in a rank's partition.
    """

    numel: int
    size: int
    offset: int = 0
    start: int = 0

    def bounds(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return, for each rank, the first element that it holds and the one after the last; equal if it has none."""
        return tuple(self.held(rank)[:2] for rank in range(ranks))

    def held(self, rank: int) -> tuple[int, int, int]:
        """Return the first element that a rank holds, the one after the last, and where its partition has the first."""
        # The edges of the rank's part, counted from the parameter's first element and clipped to the parameter.
        first, last = (min(max(edge * self.size - self.offset, 0), self.numel) for edge in (rank, rank + 1))
        return first, last, self.start + max(self.offset - rank * self.size, 0)

    def overlaps(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield who holds some elements, in order: the rank, the first element and the one after the last, and where.

        Args:
            first, last: the elements, half open.
        """
        while first < last:
            rank = (self.offset + first) // self.size
            begin, end, position = self.held(rank)
            end = min(end, last)
            yield rank, first, end, position + first - begin
            first = end


@dataclass(frozen=True)
class Slice:
    """The elements of one parameter that the partition of each rank holds, in row-major order.

    Attributes:
        shape: the shape of the whole parameter.
        division: the division of the parameter.
        ranks: number of partitions.
        view: the view of the parameter.
        name: the name of the parameter.
        factor: the factor of its learning rate.
    """

    shape: tuple[int, ...]
    division: Division
    ranks: int
    view: View = WHOLE
    name: str = ""
    factor: float = 1.0

    def elements(self, rank: int) -> slice:
        """Return where the partition of a rank holds them."""
        first, last, position = self.division.held(rank)
        return slice(position, position + last - first)

    def shards(self) -> tuple[Shards, ...]:
        """Return, for each part of the parameter's view, what each rank stores of it."""
        rows, columns = self.view.folded(self.shape)[-2:]
        bounds = self.division.bounds(self.ranks)
        return shards_of(self.view, self.shape, tuple(FlatRegion((rows, columns), *of_rank) for of_rank in bounds))


@dataclass(frozen=True)
class Partition:
    """One flat tensor in a param group, and the slices that it consists of.

    Attributes:
        group: the ranks that hold the other partitions of the same parameters.
        rank: this process in the group.
        slices: in the order of the param group before partitioning, which is the order of a single process.
        device: where matrices are orthogonalized; the partition itself may be offloaded.
        last: whether it is the last partition of its param group to be stepped.
        without_gradient: returns the elements that have no gradient in this step and whose memory is stale. None if
            such elements hold zeros.
    """

    group: ProcessGroup
    rank: int
    slices: Sequence[Slice]
    device: torch.device
    last: bool = True
    without_gradient: Callable[[], Sequence[slice]] | None = None


Partitions = Mapping[Tensor, Partition]
"""Partitions by the flat tensors in param groups, those of Muon and of AdamW."""
