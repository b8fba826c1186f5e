"""Forms and block sizes that small matrices would not choose themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from hf_muon.math.cost import BlockRows


class Way(NamedTuple):
    """How the steps of an orthogonalization are taken; None as `hf_muon.math.cost` chooses."""

    lengths: tuple[int, ...] | None
    rows: BlockRows | None


STANDARD = (1, 1, 1, 1, 1)
CHOSEN = Way(None, None)
WAYS = [
    Way(STANDARD, BlockRows(5, 3)),
    Way((3, 2), None),
    Way((3, 2), BlockRows(5, 4)),
    Way((2, 2, 1), None),
    Way((2, 2, 1), BlockRows(3, 3)),
    Way((1, 2, 2), BlockRows(4, 7)),
]


def lengths_of(lengths: Sequence[int] | None, steps: int) -> tuple[int, ...] | None:
    """Return segments for this many steps: those given over and over, the last one cut."""
    result: list[int] = []
    for length in itertools.cycle(lengths or ()):
        if sum(result) == steps:
            break
        result.append(min(length, steps - sum(result)))
    return tuple(result) or None
