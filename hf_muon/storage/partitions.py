"""Flat partitions of DeepSpeed ZeRO, which replace the parameters in param groups: slices of parameters, end to end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
        offset: of the parameter in the flat tensor.
        start: of the part in a rank's partition.
    """

    numel: int
    size: int
    offset: int = 0
    start: int = 0

    def bounds(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return the elements that each rank holds; see `Slice`."""
        return partition_bounds(self.numel, self.size, ranks, self.offset)

    def held(self, rank: int) -> tuple[int, int, int]:
        """Return the first element that a rank holds, the one after the last, and where its partition has the first."""
        first, last = (min(max(edge * self.size - self.offset, 0), self.numel) for edge in (rank, rank + 1))
        return first, last, self.start + max(self.offset - rank * self.size, 0)

    def overlaps(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield who holds some elements, in order: the rank, the first element and the one after the last, and where.

        Args:
            first, last: the elements, half open.
        """
        while first < last:
            rank = (self.offset + first) // self.size
            begin, end, at = self.held(rank)
            end = min(end, last)
            yield rank, first, end, at + first - begin
            first = end


@dataclass(frozen=True)
class Slice:
    """The elements of one parameter that the partition of each rank holds.

    Attributes:
        shape: of the whole parameter.
        bounds: for each rank, the first element in its partition, in row-major order, and the one after the last;
            equal if the partition holds none.
        start: offset of this rank's elements in its partition.
        view: of the parameter.
        name: of the parameter.
        division: what `bounds` and `start` follow from, if known.
        factor: of its learning rate.
    """

    shape: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    start: int
    view: View = WHOLE
    name: str = ""
    division: Division | None = None
    factor: float = 1.0

    def elements(self, rank: int) -> slice:
        """Return where the partition of this rank holds them."""
        first, last = self.bounds[rank]
        return slice(self.start, self.start + last - first)

    def shards(self) -> tuple[Shards, ...]:
        """Return, for each part of the parameter's view, what each rank stores of it."""
        rows, columns = self.view.folded(self.shape)[-2:]
        return shards_of(self.view, self.shape, _flat_regions((rows, columns), self.bounds))


@lru_cache(maxsize=1024)
def _flat_regions(matrix: tuple[int, int], bounds: tuple[tuple[int, int], ...]) -> tuple[FlatRegion, ...]:
    """Return each rank's region."""
    return tuple(FlatRegion(matrix, first, last) for first, last in bounds)


@dataclass(frozen=True)
class Partition:
    """One flat tensor in a param group, and the slices that it consists of.

    Attributes:
        group: the ranks that hold the other partitions of the same parameters.
        rank: of this process in the group.
        slices: in the order of the param group before partitioning, which is the order of a single process.
        device: on which matrices are orthogonalized; the partition itself may be offloaded.
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
"""Partitions by the flat tensors that stand in param groups, those of Muon and of AdamW."""


def partition_bounds(numel: int, size: int, ranks: int, offset: int = 0) -> tuple[tuple[int, int], ...]:
    """Return which elements of a parameter lie in each of the equal partitions of a flat tensor.

    Args:
        numel: of the parameter.
        size: elements of a partition.
        ranks: number of partitions.
        offset: of the parameter in the flat tensor.
    """
    edges = [min(max(rank * size - offset, 0), numel) for rank in range(ranks + 1)]
    return tuple(itertools.pairwise(edges))
