"""Which matrices a weight holds, where a model keeps several in one, or stores them otherwise than ``(out, in)``.

Neither can be seen in a weight: fused projections of equal shape are laid out part after part in one model and head
after head in another. What stands here was read in the forward methods of transformers' models, and is found by the
class of the module; the sizes are the module's own, or its config's. A layout that is not known, or whose sizes do
not make up the weight, is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from hf_muon.routing.fused_rules import FLAT, HEAD_SIZES, RULES, STACKS, TRANSPOSED, classes_of, number
from hf_muon.routing.parts import Fused, Part, WeightLayout

# Names of the projections of an attention.
QUERY = re.compile(r"q|query|q_proj|query_proj|to_q|q_b_proj|k|key|k_proj|key_proj|to_k|v|value|v_proj|value_proj|to_v")


def layout_of(shape: Sequence[int], name: str, owner: nn.Module, leaf: str, parent: nn.Module | None) -> WeightLayout:
    """How a weight is stored.

    Args:
        shape: of the whole weight.
        name: of the parameter in the module that holds it, `weight` in most cases.
        owner: that module.
        leaf: its name in the module around it.
        parent: the module around it.
    """
    known = classes_of(owner)
    if "DbrxExpertGLU" in known:
        return WeightLayout(transposed=name == "w2", experts=owner.moe_num_experts)  # type: ignore[arg-type]
    transposed = bool(getattr(owner, "is_transposed", False)) or not known.isdisjoint(TRANSPOSED.get(name, ()))
    holder, word = (parent, leaf) if name == "weight" else (owner, name)
    fused = _fused(word, holder, shape[-1 if transposed else -2]) if holder is not None and len(shape) < 4 else None
    stack, flat = (not known.isdisjoint(classes.get(name, ())) for classes in (STACKS, FLAT))
    return WeightLayout(transposed, fused, stack=stack, flat=flat)


def heads_of(leaf: str, parent: nn.Module | None, rows: int) -> Fused | None:
    """The heads of a query, key or value projection that is a weight of its own; None where it has no known heads."""
    # Where keys are compressed, `head_dim` is that of a part of a query.
    sizes = ("qk_head_dim", *HEAD_SIZES) if leaf.startswith("q") else HEAD_SIZES
    head = number(parent, *sizes) if parent is not None and QUERY.fullmatch(leaf) else 0
    return Fused((Part("head", rows, head),)) if head and rows > head and rows % head == 0 else None


def _fused(word: str, module: nn.Module, size: int) -> Fused | None:
    classes = " ".join(base.__name__ for base in type(module).__mro__)
    theirs = any(
        base.__module__.startswith(("transformers.", "timm.", "torch.nn.")) for base in type(module).__mro__[:-2]
    )
    for words, pattern, rule in RULES:
        if re.fullmatch(words, word) and theirs and re.search(pattern, classes):
            found = rule(module, size)
            if found is not None and found.size == size and all(part.size > 0 for part in found.parts):
                return found
    return None
