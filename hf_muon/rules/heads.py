"""Attention heads for rules: their number, and the rows of weights that belong to them.

`hf_muon.routing.attention` finds the attentions of a model, and `attention_logits` measures their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    """The heads to which the outputs of a projection belong.

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
        name: the name of its module.
        module: the module.
        heads: the number of its heads, and how they meet.
        size: the size of a query head.
        rows: the rows of each weight and bias of its query and key projections, by the name of the parameter.
    """

    name: str
    module: nn.Module
    heads: Heads
    size: int
    rows: Mapping[str, Rows]


LogitsOf = Callable[[], "list[Tensor | None]"]
"""Returns for each attention the largest logit of each head ``(H,)``, fp32, in the forward passes of training since the
last call; None for an attention that no forward pass has used."""
