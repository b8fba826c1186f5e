"""Which numbers of a model's weights are hidden sizes, and which end there, as tokens and classes do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from hf_muon.routing.model_facts import class_counts, is_of_base_model
from hf_muon.routing.parameters import CONV_TYPES, EMBEDDING_TYPES, ModelParameter

# Of how many equal parts a fused weight may be made (adaptive norms have six), each of at least so many rows, and how
# many equal results may be read as one.
_FUSED, _LEAST, _JOINED = (2, 3, 4, 6), 8, (1, 2, 3, 4)
# A table that is padded to a multiple of 64 or 128 may have this part of its rows more than a head, or less.
_PADDING = 64

NOTHING, RESULT, UNCLEAR = ("", False), ("result", False), ("token or class", False)
"""What a weight has a row for that is a hidden matrix, that no other weight reads, and of which both may be true."""


class Widths:
    """The sizes of what the weights of a model read and put out for a token, and the rows of its tables.

    Args:
        params: the parameters of the model, without adapters.
    """

    def __init__(self, params: Iterable[ModelParameter]) -> None:
        self._read: set[int] = set()
        self._made: set[int] = set()
        self._flattened: set[int] = set()
        """Sizes of which several may be read as one: channels of images, directions of a recurrent network."""
        self._read_outside: set[int] = set()
        """Sizes that something outside of layers reads, or that embeddings have."""
        self._tables: set[tuple[int, int]] = set()
        params = list(params)
        sizes = [set(matrix_of(param) or ()) - {1} for param in params]
        weights_with = Counter(size for of_param in sizes for size in of_param)
        pairs_with = Counter(size for pair in set(map(frozenset, sizes)) if len(pair) > 1 for size in pair)
        for param in params:
            is_outside = not param.in_layer
            if isinstance(param.owner, EMBEDDING_TYPES):
                self._tables.add((param.owner.num_embeddings, param.owner.embedding_dim))
                self._made.add(param.owner.embedding_dim)
                self._read_outside.add(param.owner.embedding_dim)
                continue
            read, made = _sizes(param)
            if is_outside and is_bare(param):
                # It may be a table or a head, so its sizes are hidden ones only if another weight has them, too. Two
                # parameters of one shape may be a table and its head.
                others = weights_with if param.own_name.startswith("weight") else pairs_with
                read = made = {size for size in read if others[size] > 1}
            self._read |= read
            self._made |= made
            self._read_outside |= read if is_outside else set()
            if isinstance(param.owner, (*CONV_TYPES, nn.RNNBase)):
                self._flattened |= made
        self._rows = {rows for rows, _ in self._tables}
        # What something reads and no single weight makes: results that are joined, of which one is made here.
        self._sums = {read - made for read in self._read - self._made for made in self._made}

    def end_of(self, param: ModelParameter) -> tuple[str, bool]:
        """Return what a weight has a row for, if its rows are results of the model, and whether that is certain.

        In layers, only heads that predict several tokens at once, or leave early, have rows for tokens and classes.
        """
        rows, columns = matrix_of(param) or (0, 0)
        is_outside = not param.in_layer
        if is_bare(param) and not param.own_name.startswith("weight") and rows in self._read | self._made:
            rows, columns = columns, rows  # stored as it is multiplied, or as a table is
        ends = rows > 0 and self._ends(rows, columns, param)
        # In a layer, as the keys of few heads have.
        is_part = not is_outside and rows > 0 and any(size % rows == 0 for size in self._read)
        ends = ends and not is_part
        # Layers may read as many numbers as there are tokens, but few matrices outside have the shape of a table, too.
        read = self._read_outside if (rows, columns) in self._tables else self._read
        if is_outside and not is_bare(param) and {rows - 1, rows, rows + 1} & self._rows and rows not in read:
            return "token", True
        if ends and (
            rows == max(self._rows, default=0) or (is_outside and any(_is_padded(rows, size) for size in self._rows))
        ):
            return "token", True
        is_class = (ends or is_outside) and rows in class_counts(module for _, module in param.steps)
        if is_class and is_outside and not is_bare(param) and not self._is_read(rows, is_flattened=False):
            return "class", True  # what it reads may be joined from several results
        if ends and (is_class or ((is_outside or param.ends_sequence) and not is_of_base_model(param))):
            return ("class", True) if is_class else RESULT
        # The rows say that it is a head, and other weights say that they read them.
        may_be_tokens = (rows == columns if is_outside else rows not in self._read) and any(
            width == columns and (rows == size or (is_outside and (abs(rows - size) == 1 or _is_padded(rows, size))))
            for size, width in self._tables
        )
        return UNCLEAR if may_be_tokens or (is_class and is_outside and columns in self._made) else NOTHING

    def _ends(self, rows: int, columns: int, param: ModelParameter) -> bool:
        """Return whether a weight reads a size of this model, and no weight reads what it puts out."""
        if is_bare(param):
            return columns in self._read | self._made and rows not in self._read | self._made
        is_made = columns in self._made or (
            not param.is_kernel and any(size >= _LEAST and columns % size == 0 for size in self._flattened)
        )
        return is_made and not self._is_read(rows, is_flattened=rows in self._flattened and param.is_kernel)

    def _is_read(self, rows: int, *, is_flattened: bool) -> bool:
        """Return whether weights read this size: in parts, joined with equal or other results, or flattened."""
        if any(rows == parts * size for size in self._read if size >= _LEAST for parts in _FUSED):
            return True
        if any(rows * parts in self._read for parts in _JOINED) or rows in self._sums:
            return True
        return is_flattened and any(size % rows == 0 for size in self._read)


def _is_padded(rows: int, table: int) -> bool:
    """Return whether rows may be those of a table, one of both padded."""
    return abs(rows - table) <= table // _PADDING


def is_bare(param: ModelParameter) -> bool:
    """Return whether a matrix is a parameter of a class of somebody's own, whose code says what it reads."""
    is_known = type(param.owner).__module__.startswith(("torch.", "transformers."))
    return len(param.shape) == 2 and widths_of(param.owner) is None and not is_known


def matrix_of(param: ModelParameter) -> tuple[int, int] | None:
    """Return the rows and columns of a weight that may be a head; None for other parameters."""
    if is_bare(param):
        return param.shape[0], param.shape[1]
    return widths_of(param.owner) if param.own_name == "weight" else None


def widths_of(module: nn.Module) -> tuple[int, int] | None:
    """Return how many numbers a linear layer or a convolution puts out and reads for a token; None for others."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, CONV_TYPES):
        return module.out_channels, module.in_channels
    return None


def _sizes(param: ModelParameter) -> tuple[set[int], set[int]]:
    """Return the sizes that a parameter's module reads, and those that it puts out; both may be all that are known."""
    owner: Any = param.owner
    widths = widths_of(owner)
    if widths is not None:
        return ({widths[1]}, {widths[0]}) if param.own_name == "weight" else (set(), set())
    if isinstance(owner, nn.RNNBase):
        return {owner.input_size, owner.hidden_size}, {owner.hidden_size}
    if "bias" in param.own_name:
        return set(), set()
    sizes = set(param.shape[-2:]) - {1}
    return sizes, sizes
