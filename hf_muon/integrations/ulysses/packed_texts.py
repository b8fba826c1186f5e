"""Packed texts under sdpa and sequence parallelism: each text attends to itself, and no mask is built.

DeepSpeed gathers whole sequences for a part of the heads, and drops the mask that would separate the texts of a row.
Flash attention reads the ends of texts from `position_ids`; sdpa does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_muon.integrations.names import mark

Attend = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Where the texts of a batch are, whose tokens are numbered row by row.

    Attributes:
        tokens: for each length of texts, their tokens, of shape (texts, length).
        place: of each token in the concatenation of `tokens`.
    """

    tokens: tuple[Tensor, ...]
    place: Tensor


def texts_of(positions: Tensor) -> Texts | None:
    """Return where texts are, whose positions count up by one; None if each row holds one. Reads from the device once.

    Args:
        positions: of shape (rows, tokens).
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    first = begins.flatten().nonzero().flatten().cpu()
    if len(first) == len(positions):
        return None
    lengths = torch.diff(first, append=torch.tensor([positions.numel()]))
    tokens = [first[lengths == length][:, None] + torch.arange(length) for length in sorted(set(lengths.tolist()))]
    place = torch.cat([each.flatten() for each in tokens]).argsort()
    return Texts(tuple(each.to(positions.device) for each in tokens), place.to(positions.device))


class TextByText:
    """Two layers around DeepSpeed's attention, one outside and one inside, that look at positions once per batch.

    DeepSpeed gathers positions in every layer of a model, from one tensor: the texts are remembered by that one.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        self._source: Tensor | None = None

    def outside(self, attend: Attend) -> Attend:
        """Return what notes the positions that DeepSpeed is about to gather."""

        @functools.wraps(attend)
        def attend_noted(*args: Any, **kwargs: Any) -> Any:
            self._source = kwargs.get("position_ids")
            try:
                return attend(*args, **kwargs)
            finally:
                self._source = None

        return mark(attend_noted)

    def inside(self, attend: Attend) -> Attend:
        """Return an attention of whole sequences that attends within each text."""

        @functools.wraps(attend)
        def attend_within_texts(
            module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            positions, rows, length = kwargs.get("position_ids"), query.shape[0], query.shape[2]
            if attention_mask is not None or positions is None or positions.dim() != 2 or positions.shape[1] != length:
                return attend(module, query, key, value, attention_mask, *args, **kwargs)
            positions = positions.expand(rows, length)
            texts = self._texts_of(positions)
            if texts is None:
                return attend(module, query, key, value, None, *args, **kwargs)
            states = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]  # (token, head, dim)
            outputs = []
            for tokens in texts.tokens:  # texts of one length are the rows of one call
                own = [each.index_select(0, tokens.flatten()).view(*tokens.shape, *each.shape[1:]) for each in states]
                kwargs["position_ids"] = positions.flatten()[tokens]
                output, _ = attend(module, *(each.transpose(1, 2) for each in own), None, *args, **kwargs)
                outputs.append(output.flatten(0, 1))
            whole = torch.cat(outputs).index_select(0, texts.place)
            return whole.view(rows, length, *whole.shape[1:]), None

        return mark(attend_within_texts)

    def _texts_of(self, positions: Tensor) -> Texts | None:
        source = self._source
        if source is None:
            return texts_of(positions)
        if source not in self._known:
            self._known[source] = texts_of(positions)
        texts: Texts | None = self._known[source]
        return texts
