"""Who stores a parameter: the ranks of a process group, each a region of it, or this process alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_muon.storage.boxes import Shards, shards_of
from hf_muon.storage.regions import Region, whole
from hf_muon.storage.views import View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class SharedStorage:
    """How the ranks of a process group store a tensor.

    Attributes:
        group: the process group; None where this process has the tensor alone.
        shape: of the whole tensor.
        regions: what each rank stores, in the order of the group's ranks; empty for flat partitions.
    """

    group: ProcessGroup | None
    shape: tuple[int, ...]
    regions: Sequence[Region] = ()
    _shards: dict[View, tuple[Shards, ...]] = field(default_factory=dict, repr=False)

    def shards(self, view: View) -> tuple[Shards, ...]:
        """Return, for each part of a view of the tensor, what each rank stores of it."""
        if view not in self._shards:
            self._shards[view] = shards_of(view, self.shape, tuple(self.regions))
        return self._shards[view]


def replicated(shape: tuple[int, ...], group: ProcessGroup | None) -> SharedStorage:
    """Return the storage of a tensor that each rank of a group has whole, or this process alone."""
    return SharedStorage(group, shape, (whole(shape),) * (1 if group is None else group.size()))
