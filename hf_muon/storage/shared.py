"""Who stores a parameter: the ranks of a process group, each a region of it, or this process alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hf_muon.storage.regions import Region, Stored, part_regions, whole
from hf_muon.storage.views import View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SharedStorage:
    """How the ranks of a process group store a tensor.

    Attributes:
        group: the process group.
        regions: what each rank stores, in the order of the group's ranks. Tensors that are stored alike should share
            one object: `distributed.holdings` compares these sequences by identity.
    """

    group: ProcessGroup
    regions: Sequence[Stored]

    def parts(self, view: View, shape: tuple[int, ...]) -> list[SharedStorage]:
        """Return how the ranks store each part of a view of the tensor, whose whole shape is `shape`."""
        return [SharedStorage(self.group, regions) for regions in part_regions(view, shape, tuple(self.regions))]


def unshared_parts(view: View, shape: tuple[int, ...]) -> list[Stored]:
    """Return how a process that stores all of a tensor stores each part of its view."""
    return [regions[0] for regions in part_regions(view, shape, (whole(shape),))]


@lru_cache(maxsize=1024)
def replicated_regions(shape: tuple[int, ...], ranks: int) -> Sequence[Region]:
    """Return each rank's region of a replicated tensor, which is all of it."""
    return (whole(shape),) * ranks
