"""Who stores a parameter: the ranks of a process group, each a region of it, or this process alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hf_muon.storage.boxes import Held, parts_held
from hf_muon.storage.regions import FlatRegion, Region, whole
from hf_muon.storage.views import View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SharedStorage:
    """How the ranks of a process group store a tensor.

    Attributes:
        group: the process group; None where this process has the tensor alone.
        regions: what each rank stores, in the order of the group's ranks.
    """

    group: ProcessGroup | None
    regions: Sequence[Region | FlatRegion]

    def parts(self, view: View, shape: tuple[int, ...]) -> Sequence[Sequence[Held]]:
        """Return, for each part of a view of the tensor of this whole shape, what each rank stores of it."""
        return parts_held(view, shape, tuple(self.regions))


def unshared(shape: tuple[int, ...]) -> SharedStorage:
    """Return the storage of a tensor that this process has alone."""
    return SharedStorage(None, replicated_regions(shape, 1))


@lru_cache(maxsize=1024)
def replicated_regions(shape: tuple[int, ...], ranks: int) -> Sequence[Region]:
    """Return each rank's region of a replicated tensor, which is all of it."""
    return (whole(shape),) * ranks
