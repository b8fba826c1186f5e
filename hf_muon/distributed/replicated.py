"""Plain parameters that every rank of a group stores whole (DDP)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hf_muon.distributed.layout import Region, whole


@lru_cache(maxsize=1024)
def replicated_regions(shape: tuple[int, ...], ranks: int) -> Sequence[Region]:
    """Each rank's region of a parameter: all of it."""
    return (whole(shape),) * ranks
