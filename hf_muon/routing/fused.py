"""Which matrices a weight holds, if a model stores several in one, or in another order than ``(out, in)``.

A weight does not show this: fused projections of equal shape are laid out part after part in one model and head after
head in another. The rules follow forward methods that were read, of transformers, timm and torch, and go by the
class of the module; sizes come from the module or its config. A weight without a known layout, or whose sizes do not
add up, stays one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from hf_muon.routing.fused_rules import BELOW, FLAT, HEAD_SIZES, RULES, STACKS, TRANSPOSED, number, read_as
from hf_muon.routing.parts import Fused, Part, WeightLayout

# Names of the projections of an attention.
QUERY = re.compile(r"q|query|q_proj|query_proj|to_q|q_b_proj|k|key|k_proj|key_proj|to_k|v|value|v_proj|value_proj|to_v")


def layout_of(shape: Sequence[int], name: str, owner: nn.Module, leaf: str, parent: nn.Module | None) -> WeightLayout:
    """Return how a weight is stored.

    Args:
        shape: whole shape of the weight.
        name: of the parameter in its owner, usually `weight`.
        owner: the module that holds the parameter.
        leaf: name of the owner in the module around it.
        parent: the module around it.
    """
    known = read_as(owner)
    declared = bool(known and getattr(owner, "is_transposed", False))
    transposed, stack, flat = (known in classes.get(name, ()) for classes in (TRANSPOSED, STACKS, FLAT))
    holder, word = (parent, leaf) if name == "weight" else (owner, name)
    rows = shape[-1 if transposed or declared else -2]
    fused = _fused(word, holder, rows) if holder is not None and len(shape) < 4 else None
    below = number(owner, BELOW[known]) if known in BELOW else 0
    return WeightLayout(transposed or declared, fused, below=below, stack=stack, flat=flat)


def heads_of(leaf: str, parent: nn.Module | None, rows: int) -> Fused | None:
    """Return the heads of a query, key or value projection that is not fused; None if heads are unknown."""
    # With compressed keys, `head_dim` is only a part of a query's head.
    sizes = ("qk_head_dim", *HEAD_SIZES) if leaf.startswith("q") else HEAD_SIZES
    head = number(parent, *sizes) if parent is not None and QUERY.fullmatch(leaf) else 0
    return Fused((Part("head", rows, head),)) if head and rows > head and rows % head == 0 else None


def _fused(word: str, module: nn.Module, size: int) -> Fused | None:
    known = read_as(module)
    for words, classes, rule in RULES if known else ():
        if re.fullmatch(words, word) and (classes == "*" or known in classes.split()):
            fused = rule(module, size)
            if fused is not None and fused.size == size and all(part.size > 0 for part in fused.parts):
                return fused
    return None
