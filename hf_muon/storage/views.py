"""How a stored tensor is read as matrices: which of its dims is the input, and where it is cut into parts.

A view is written as text, so that param groups and checkpoints can hold it:

- nothing: as it is stored, ``(out, in)``, or a stack of such matrices ``(B, out, in)``.
- ``transposed``: stored as ``(in, out)``.
- ``flat``: the dims after the first one make the columns, as those of a convolution's kernel.
- ``rows 64+16+16``: three matrices, one below the other. ``rows 8x16``: eight of 16 rows each.
- ``columns 24*(1+1)``: two matrices whose columns take turns, 24 times one of the first and one of the second.
  ``columns 24x(2+1)`` are 48 matrices.

These are joined by commas: ``transposed, columns 24*(1+1)``. A cut of a stack is one of each of its matrices.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Some indices along a dim: `count` blocks of `size`, the first at `start` and each `stride` after the last one."""

    start: int
    size: int
    count: int = 1
    stride: int = 0

    @property
    def length(self) -> int:
        """Number of indices."""
        return self.size * self.count

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """These indices of a tensor; a view. Several blocks give two dims, ``(count, size)``, in the place of one."""
        if self.count == 1:
            return tensor.narrow(dim, self.start, self.size)
        span = tensor.narrow(dim, self.start, (self.count - 1) * self.stride + self.size)
        return span.unfold(dim, self.size, self.stride).movedim(-1, dim + 1)

    def shape(self) -> tuple[int, ...]:
        """The dims that `of` puts in the place of one."""
        return (self.size,) if self.count == 1 else (self.count, self.size)

    def within(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[Blocks, tuple[int, int]]]:
        """Which of these indices are among some stored ones.

        Args:
            ranges: half-open ranges of indices, in the order in which they are stored.

        Yields:
            Where they are stored, and the range of their own that they are: index 0 is the first one of these blocks.
        """
        position = 0
        for first, last in ranges:
            yield from self._within(first, last, position - first)
            position += last - first

    def _within(self, first: int, last: int, shift: int) -> Iterator[tuple[Blocks, tuple[int, int]]]:
        stride = self.stride or self.size
        block = max(0, (first - self.start) // stride)
        while block < self.count and self.start + block * stride < last:
            begin = self.start + block * stride
            lower, upper = max(begin, first), min(begin + self.size, last)
            whole = (last - begin - self.size) // stride + 1 if lower == begin else 0
            if whole > 1:
                count = min(whole, self.count - block)
                own = (block * self.size, (block + count) * self.size)
                yield Blocks(begin + shift, self.size, count, stride if count > 1 else 0), own
                block += count
                continue
            if lower < upper:
                own = (block * self.size + lower - begin, block * self.size + upper - begin)
                yield Blocks(lower + shift, upper - lower), own
            block += 1


@dataclass(frozen=True)
class Cut:
    """Some indices along a dim of what is stored, which is seen in a shape of its own first where it is stored flat."""

    blocks: Blocks
    dim: int
    shape: tuple[int, ...] | None = None

    def of(self, stored: Tensor) -> Tensor:
        """A view."""
        return self.blocks.of(stored if self.shape is None else stored.view(self.shape), self.dim)

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that view."""
        shape = self.shape or stored
        return (*shape[: self.dim], *self.blocks.shape(), *shape[self.dim + 1 :])


@dataclass(frozen=True)
class View:
    """What the text of a view says.

    Attributes:
        transposed: whether the matrices are stored as ``(in, out)``.
        flat: whether the dims after the first one make the columns.
        axis: the dim that is cut, -2 for rows and -1 for columns; 0 for none.
        parts: where each matrix lies along it; empty for none.
        text: as it is written.
    """

    transposed: bool = False
    flat: bool = False
    axis: int = 0
    parts: tuple[Blocks, ...] = ()
    text: str = field(default="", compare=False)

    def folded(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The shape ``(m, n)`` or ``(B, m, n)`` before it is cut."""
        return (stored[0], math.prod(stored[1:])) if self.flat else tuple(stored)

    def shapes(self, stored: Sequence[int]) -> list[tuple[int, ...]]:
        """The shape ``(m, n)`` or ``(B, m, n)`` of each part, as it is stored."""
        shape = self.folded(stored)
        if not self.parts:
            return [shape]
        before, after = (shape[:-2], shape[-1:]) if self.axis == -2 else (shape[:-1], ())
        return [(*before, part.length, *after) for part in self.parts]


WHOLE = View()

_FLAGS = ("transposed", "flat")
_AXES = {"rows": -2, "columns": -1}
_WORDS = {axis: word for word, axis in _AXES.items()}


@lru_cache(maxsize=4096)
def parse(text: str) -> View:
    """What a text says.

    Raises:
        ValueError: a text that is no view.
    """
    found: dict[str, str | None] = {}
    for words in text.split(", ") if text else ():
        word, _, sizes = words.partition(" ")
        if word in found or word not in (*_FLAGS, *_AXES) or (word in _FLAGS) == bool(sizes):
            raise _unreadable(text)
        found[word] = sizes or None
    axes = [word for word in _AXES if word in found]
    if len(axes) > 1 or ("flat" in found and "columns" in found):
        raise _unreadable(text)
    parts: tuple[Blocks, ...] = ()
    if axes:
        try:
            parts = tuple(_blocks(found[axes[0]] or ""))
        except ValueError:
            raise _unreadable(text) from None
    return View("transposed" in found, "flat" in found, _AXES[axes[0]] if axes else 0, parts, text)


def _unreadable(text: str) -> ValueError:
    return ValueError(
        f"{text!r} is not a view. Valid: 'transposed', 'flat' and one of 'rows SIZES' or 'columns SIZES', joined by "
        "commas; SIZES are joined by +, as 64+16, 8x64, 8*(64+16) or 8x(64+16)"
    )


_MOST_PARTS = 2**20  # of one weight; a text that asks for more is a slip, and would take all memory
_TERM = re.compile(r"(?:(\d+)([x*]))?(?:(\d+)|\((\d+(?:\+\d+)*)\))(\+|$)")


def _blocks(text: str) -> Iterator[Blocks]:
    """Where the parts lie that a list of sizes names.

    Raises:
        ValueError: it is no such list.
    """
    start, at = 0, 0
    while at < len(text) or not at or text.endswith("+"):
        term = _TERM.match(text, at)
        if term is None:
            raise ValueError
        times, kind = int(term[1] or 1), term[2]
        sizes = [int(size) for size in (term[3] or term[4]).split("+")]
        if not times or not min(sizes) or times * len(sizes) > _MOST_PARTS:
            raise ValueError
        period = sum(sizes)
        if kind == "*" and times > 1:
            for before, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
                yield Blocks(start + before, size, times, period)
        else:
            for before, size in zip(itertools.accumulate(sizes * times, initial=0), sizes * times, strict=False):
                yield Blocks(start + before, size)
        start += period * times
        at = term.end()


def complaint(text: str, stored: Sequence[int]) -> str | None:
    """Why a tensor of some shape cannot be read so; None where it can."""
    try:
        view = parse(text)
    except ValueError as error:
        return f"has a view that cannot be read: {error}"
    shape = view.folded(stored) if stored else ()
    if len(shape) not in (2, 3):
        return f"is not a matrix, and neither by its view {text!r}" if text else "is not a matrix"
    if view.parts and (total := sum(part.length for part in view.parts)) != shape[view.axis]:
        return f"has the view {text!r}, which makes {total} {_WORDS[view.axis]} of {shape[view.axis]}"
    return None


def texts_complaint(texts: Any, count: int) -> str | None:
    """Say why something is no list of texts, one for each of `count` parameters; None where it is, or is None."""
    if texts is None:
        return None
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        return f"{texts!r:.200} is not a list of texts"
    return None if len(texts) == count else f"{len(texts)} of {count} parameters"


def views_of(group: Mapping[str, Any]) -> list[str]:
    """The view of each parameter of a group. Partitions of ZeRO, which stand in the place of parameters, have none."""
    views = group.get("views")
    if views is None or len(views) != len(group["params"]):
        return [""] * len(group["params"])
    return list(views)
