"""How a weight is stored, and which matrices it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """One matrix of a fused projection.

    Attributes:
        name: q, k, v, gate, up...
        size: its share of the output dim, per block.
        head: size of its heads; 0 without heads.
    """

    name: str
    size: int
    head: int = 0


@dataclass(frozen=True)
class Fused:
    """The parts along the output dim of a fused projection: equal blocks, each with a share of every part."""

    parts: tuple[Part, ...]
    blocks: int = 1

    @property
    def size(self) -> int:
        return self.blocks * sum(part.size for part in self.parts)

    @property
    def names(self) -> str:
        return ", ".join(part.name for part in self.parts)

    def sizes(self, per_head: bool) -> str:
        """Return the sizes in the words of a view."""
        if not per_head or not any(part.head for part in self.parts):
            sizes = "+".join(str(part.size) for part in self.parts)
            return sizes if self.blocks == 1 else f"{self.blocks}*({sizes})"
        heads = [part.head or part.size for part in self.parts for _ in range(part.size // (part.head or part.size))]
        if len(set(heads)) == 1:
            return f"{self.blocks * len(heads)}x{heads[0]}"
        if self.blocks > 1:
            return f"{self.blocks}x({'+'.join(map(str, heads))})"
        return "+".join(f"{part.size // part.head}x{part.head}" if part.head else str(part.size) for part in self.parts)


class WeightLayout(NamedTuple):
    """How a weight is stored.

    Attributes:
        transposed: stored as ``(in, out)``.
        fused: the projections along its output dim; None for a single one.
        below: number of matrices, of experts or groups, one below the other in a 2-D weight; 0 for a single one.
        stack: a 3-D weight is known to be a stack of matrices.
        flat: a 3-D weight is known to be a matrix whose columns have two dims.
    """

    transposed: bool = False
    fused: Fused | None = None
    below: int = 0
    stack: bool = False
    flat: bool = False
