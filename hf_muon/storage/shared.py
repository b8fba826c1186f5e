"""Who stores a parameter: the ranks of a process group, or one process alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hf_muon.storage.regions import Region, Stored, seen_as, whole
from hf_muon.storage.views import View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Shared:
    """A parameter that the ranks of a group store together, each a region of it."""

    group: ProcessGroup
    regions: Sequence[Stored]

    def seen_as(self, view: View, shape: tuple[int, ...]) -> list[Shared]:
        """The same of each matrix that it is seen as."""
        return [Shared(self.group, regions) for regions in seen_as(view, shape, tuple(self.regions))]


def alone(view: View, shape: tuple[int, ...]) -> list[Stored]:
    """What this process stores of each matrix that a parameter is seen as, where nobody shares it: all."""
    return [regions[0] for regions in seen_as(view, shape, (whole(shape),))]


@lru_cache(maxsize=1024)
def replicated_regions(shape: tuple[int, ...], ranks: int) -> Sequence[Region]:
    """Each rank's region of a parameter: all of it."""
    return (whole(shape),) * ranks
