"""The matrices that one weight holds, and how it is stored: what is said of a layout, wherever it is known from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """One matrix of a fused projection.

    Attributes:
        name: what it is.
        size: its share of the output dim; of one block, where there are several.
        head: the size of its heads; 0 where it has none.
    """

    name: str
    size: int
    head: int = 0


@dataclass(frozen=True)
class Fused:
    """How the output dim of a projection is shared out: blocks of equal layout, each with its share of every part."""

    parts: tuple[Part, ...]
    blocks: int = 1

    @property
    def size(self) -> int:
        return self.blocks * sum(part.size for part in self.parts)

    @property
    def names(self) -> str:
        return ", ".join(part.name for part in self.parts)

    def sizes(self, per_head: bool) -> str:
        """The sizes as the text of a view has them."""
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
        transposed: whether as ``(in, out)``.
        fused: the projections that its output dim is made of; None where it is one.
        experts: the number of experts, one below the other, in a weight of two dims; 0 for none.
        stack: whether its three dims are known to be a stack of matrices.
        flat: whether its three dims are known to be a matrix whose columns have two dims.
    """

    transposed: bool = False
    fused: Fused | None = None
    experts: int = 0
    stack: bool = False
    flat: bool = False
