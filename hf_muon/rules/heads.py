"""Heads of attention, as rules see them: how many there are, and which rows of which weights make them.

Which attentions a model has is found by `hf_muon.routing.attention`. What their heads do between two steps is measured
by whoever runs their forward pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Heads:
    """The heads of one attention.

    Attributes:
        queries: number of query heads.
        keys: number of key heads, each shared by `queries / keys` consecutive query heads.
        rotary: whether a part of each query meets a key that all heads share, as in multi-head latent attention.
        normalized: names of modules that normalize queries and keys; empty if nothing does.
    """

    queries: int
    keys: int
    rotary: bool = False
    normalized: str = ""


@dataclass(frozen=True)
class Rows:
    """Which heads the outputs of a projection belong to.

    Attributes:
        roles: for each output, 0 if its rows are neither queries nor keys, else a position in the factors ``[1, query
            heads, key heads, rotary parts of query heads]``.
        transposed: whether the weight is stored as ``(in, out)``.
    """

    roles: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention of a model.

    Attributes:
        name: of its module.
        module: the module.
        heads: its heads.
        size: of a query head.
        rows: by the name of a parameter, weight or bias, of its query and key projections.
    """

    name: str
    module: nn.Module
    heads: Heads
    size: int
    rows: Mapping[str, Rows]


class LogitSource(Protocol):
    """Measures the largest logit of each head in the forward passes of training."""

    def pop(self) -> list[Tensor | None]:
        """Return for each attention the largest logit of each head ``(H,)``, fp32, since the last call.

        None for an attention that no forward pass has used.
        """
        ...


def source_of(attentions: Sequence[Attention]) -> LogitSource | str:
    """Return what measures the logits of some attentions, or why nothing does."""
    # By name, because those who run forward passes are above this room.
    measuring = importlib.import_module("hf_muon.integrations.transformers.attention")
    source: LogitSource | str = measuring.source_of(attentions)
    return source
