"""Flat partitions of DeepSpeed ZeRO: slices of parameters, end to end, in the place of the parameters themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_muon.storage.regions import FlatRegion
from hf_muon.storage.shared import Shared
from hf_muon.storage.views import WHOLE, View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Slice:
    """What of one parameter the partitions of all ranks hold.

    Attributes:
        shape: of the whole parameter.
        bounds: for each rank, the first element that its partition holds, in row-major order, and the one after the
            last; equal where it holds none.
        start: where this rank's elements begin in its partition.
        view: how the parameter is seen as matrices.
        name: of the parameter.
    """

    shape: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    start: int
    view: View = WHOLE
    name: str = ""

    def elements(self, rank: int) -> slice:
        """Where the partition of this rank holds them."""
        first, last = self.bounds[rank]
        return slice(self.start, self.start + last - first)

    def shared(self, group: ProcessGroup) -> list[Shared]:
        """The same as who stores which region of each matrix, or stack, that the parameter is seen as."""
        rows, columns = self.view.folded(self.shape)[-2:]
        return Shared(group, _flat_regions((rows, columns), self.bounds)).seen_as(self.view, self.shape)


@lru_cache(maxsize=1024)
def _flat_regions(matrix: tuple[int, int], bounds: tuple[tuple[int, int], ...]) -> Sequence[FlatRegion]:
    """One object for parameters that are cut alike, by which an exchange knows them to be."""
    return tuple(FlatRegion(matrix, first, last) for first, last in bounds)


@dataclass(frozen=True)
class Partition:
    """One flat tensor in a param group, and the slices that it is made of.

    Attributes:
        group: the ranks that hold the other partitions of the same parameters.
        rank: this rank's place there.
        slices: in the order of the param group before partitioning, which is the order of a single process.
        device: where matrices are orthogonalized; the partition itself may be offloaded.
        last: whether it is the last one of its param group to be stepped.
        without_gradient: gives the elements for which there is no gradient in this step; their memory holds something
            else. None where it holds zeros.
    """

    group: ProcessGroup
    rank: int
    slices: Sequence[Slice]
    device: torch.device
    last: bool = True
    without_gradient: Callable[[], Sequence[slice]] | None = None


Partitions = Mapping[Tensor, Partition]
"""Partitions by the flat tensors that stand in param groups, of both halves."""


def partition_bounds(numel: int, size: int, ranks: int, offset: int = 0) -> tuple[tuple[int, int], ...]:
    """Which elements of a parameter lie in each of the equal parts that a flat tensor is cut into.

    Args:
        numel: of the parameter.
        size: elements of a part.
        ranks: number of parts.
        offset: where the parameter begins in the flat tensor.
    """
    edges = [min(max(rank * size - offset, 0), numel) for rank in range(ranks + 1)]
    return tuple(itertools.pairwise(edges))
