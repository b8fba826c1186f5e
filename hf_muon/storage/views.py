"""How a stored tensor is read as matrices: which of its dims is the input, and where it is cut into parts.

A view is written as text, so that param groups and checkpoints can hold it:

- nothing: as it is stored, ``(out, in)``, or a stack of such matrices ``(B, out, in)``.
- ``transposed``: stored as ``(in, out)``.
- ``flat``: the dims after the first one make the columns, as in the kernel of a convolution.
- ``rows 64+16+16``: three matrices, one below the other. ``rows 8x16``: eight matrices of 16 rows each.
- ``columns 24*(1+1)``: two matrices of 24 columns each, which alternate. ``columns 24x(2+1)``: 48 matrices, of two
  columns and of one in turn.

They are joined by commas: ``transposed, columns 24*(1+1)``. In a stack the cut applies to every matrix.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hf_muon.storage.tensors import quoted


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` indices along a dim.

    Attributes:
        start: the first index.
        size: indices of a block.
        count: number of blocks.
        stride: from the start of a block to the start of the next one.
    """

    start: int
    size: int
    count: int = 1
    stride: int = 0

    @property
    def length(self) -> int:
        """Number of indices."""
        return self.size * self.count

    def within(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[Blocks, tuple[int, int]]]:
        """Intersect these blocks with the indices that a rank stores.

        Args:
            ranges: half-open ranges of the stored indices, in the order in which they are stored.

        Yields:
            Blocks of positions in what the rank stores, and the range of indices that they are, counted along these
            blocks from 0.
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
            # Whole blocks in a row are one strided box; a cut one is a box by itself.
            whole = (last - begin - self.size) // stride + 1 if lower == begin else 0
            if whole > 1:
                count = min(whole, self.count - block)
                indices = (block * self.size, (block + count) * self.size)
                yield Blocks(begin + shift, self.size, count, stride if count > 1 else 0), indices
                block += count
                continue
            if lower < upper:
                indices = (block * self.size + lower - begin, block * self.size + upper - begin)
                yield Blocks(lower + shift, upper - lower), indices
            block += 1


@dataclass(frozen=True)
class View:
    """How a stored tensor is read as matrices.

    Attributes:
        transposed: whether the matrices are stored as ``(in, out)``.
        flat: whether the dims after the first one make the columns.
        axis: the dim that is cut, -2 for rows and -1 for columns; 0 if none is.
        parts: for each matrix, the rows or columns that it consists of; empty if no dim is cut.
        text: the text that it was parsed from.
    """

    transposed: bool = False
    flat: bool = False
    axis: int = 0
    parts: tuple[Blocks, ...] = ()
    text: str = field(default="", compare=False)

    def folded(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape ``(m, n)`` or ``(B, m, n)`` before the cut."""
        return (stored[0], math.prod(stored[1:])) if self.flat else tuple(stored)

    def shapes(self, stored: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shape ``(m, n)`` or ``(B, m, n)`` of each part, as it is stored."""
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
    """Return the view that a text describes.

    Raises:
        ValueError: the text is not a view.
    """
    words: dict[str, str | None] = {}
    for phrase in text.split(", ") if text else ():
        word, _, sizes = phrase.partition(" ")
        if word in words or word not in (*_FLAGS, *_AXES) or (word in _FLAGS) == bool(sizes):
            raise _unreadable(text)
        words[word] = sizes or None
    axes = [word for word in _AXES if word in words]
    if len(axes) > 1 or ("flat" in words and "columns" in words):
        raise _unreadable(text)
    parts: tuple[Blocks, ...] = ()
    if axes:
        try:
            parts = tuple(_parse_sizes(words[axes[0]] or ""))
        except ValueError:
            raise _unreadable(text) from None
    return View("transposed" in words, "flat" in words, _AXES[axes[0]] if axes else 0, parts, text)


def _unreadable(text: str) -> ValueError:
    return ValueError(
        f"{text!r} is not a view. Valid: 'transposed', 'flat' and one of 'rows SIZES' or 'columns SIZES', joined by "
        "commas; SIZES are joined by +, as 64+16, 8x64, 8*(64+16) or 8x(64+16)"
    )


# A text with more parts for one weight is a typo, and parsing it would exhaust memory.
_MOST_PARTS = 2**20
_TERM = re.compile(r"(?:(\d+)([x*]))?(?:(\d+)|\((\d+(?:\+\d+)*)\))(\+|$)")


def _parse_sizes(text: str) -> Iterator[Blocks]:
    """Yield the rows or columns of each part that a list of sizes describes.

    Raises:
        ValueError: the text is not a list of sizes.
    """
    start, at = 0, 0
    # An empty text, and one that ends with +, must fail to match.
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
    """Return why a tensor of shape `stored` does not have the view that `text` describes, or None."""
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


def texts_complaint(texts: Any, count: int | None = None) -> str | None:
    """Return why a value is neither None nor a list of texts, one for each of `count` parameters; None if it is."""
    if texts is None:
        return None
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        return f"{quoted(texts)} is not a list of texts"
    return None if count in (None, len(texts)) else f"{len(texts)} of {count} parameters"


def views_of(group: Mapping[str, Any]) -> list[str]:
    """Return the view of each parameter of a group; "" for ZeRO's partitions, which replace the parameters."""
    views = group.get("views")
    if views is None or len(views) != len(group["params"]):
        return [""] * len(group["params"])
    return list(views)
