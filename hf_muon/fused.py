"""Which matrices a weight holds, where a model keeps several in one, or stores them otherwise than ``(out, in)``.

Neither can be seen in a weight: fused projections of equal shape are laid out part after part in one model and head
after head in another. What stands here was read in the forward methods of transformers' models, and is found by the
class of the module; the sizes are the module's own, or its config's. A layout that is not known, or whose sizes do
not make up the weight, is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

_QUERY = re.compile(
    r"q|query|q_proj|query_proj|to_q|q_b_proj|k|key|k_proj|key_proj|to_k|v|value|v_proj|value_proj|to_v"
)
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")


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


class Layout(NamedTuple):
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


def layout_of(shape: Sequence[int], name: str, owner: nn.Module, leaf: str, parent: nn.Module | None) -> Layout:
    """How a weight is stored.

    Args:
        shape: of the whole weight.
        name: of the parameter in the module that holds it, `weight` in most cases.
        owner: that module.
        leaf: its name in the module around it.
        parent: the module around it.
    """
    known = _classes(owner)
    if "DbrxExpertGLU" in known:
        return Layout(transposed=name == "w2", experts=owner.moe_num_experts)  # type: ignore[arg-type]
    transposed = bool(getattr(owner, "is_transposed", False)) or not known.isdisjoint(_TRANSPOSED.get(name, ()))
    holder, word = (parent, leaf) if name == "weight" else (owner, name)
    fused = _fused(word, holder, shape[-1 if transposed else -2]) if holder is not None and len(shape) < 4 else None
    stack, flat = (not known.isdisjoint(classes.get(name, ())) for classes in (_STACKS, _FLAT))
    return Layout(transposed, fused, stack=stack, flat=flat)


def heads_of(leaf: str, parent: nn.Module | None, rows: int) -> Fused | None:
    """The heads of a query, key or value projection that is a weight of its own; None where it has no known heads."""
    # Where keys are compressed, `head_dim` is that of a part of a query.
    sizes = ("qk_head_dim", *_HEAD_SIZES) if leaf.startswith("q") else _HEAD_SIZES
    head = _number(parent, *sizes) if parent is not None and _QUERY.fullmatch(leaf) else 0
    return Fused((Part("head", rows, head),)) if head and rows > head and rows % head == 0 else None


# Classes of modules by the name of a weight: those in which it is (in, out),
_TRANSPOSED = {
    "weight": ("Conv1D", "AriaGroupedExpertsGemm"),
    "gate_up_proj": ("Llama4TextExperts",),
    "down_proj": ("Llama4TextExperts",),
    "mm_input_projection_weight": ("Gemma3MultiModalProjector",),
    "input_gate_weight": ("RecurrentGemmaRglru",),
    "recurrent_gate_weight": ("RecurrentGemmaRglru",),
    **dict.fromkeys("qkvr", ("XLNetRelativeAttention",)),
}
# those in which it is a matrix for each head,
_STACKS = {
    "x_proj_weight": ("ZambaMambaMixer",),
    "dt_proj_weight": ("ZambaMambaMixer",),
    "input_gate_weight": ("RecurrentGemmaRglru",),
    "recurrent_gate_weight": ("RecurrentGemmaRglru",),
}
# and those in which it is (hidden, heads, size of a head).
_FLAT = dict.fromkeys("qkvor", ("XLNetRelativeAttention",))


def _classes(module: nn.Module) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}


def _number(module: Any, *names: str) -> int:
    """The first of some attributes that a module, or its config, has; 0 for none."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            found = getattr(holder, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return 0


def _fused(word: str, module: nn.Module, size: int) -> Fused | None:
    classes = " ".join(base.__name__ for base in type(module).__mro__)
    theirs = any(
        base.__module__.startswith(("transformers.", "timm.", "torch.nn.")) for base in type(module).__mro__[:-2]
    )
    for words, pattern, rule in _RULES:
        if re.fullmatch(words, word) and theirs and re.search(pattern, classes):
            found = rule(module, size)
            if found is not None and found.size == size and all(part.size > 0 for part in found.parts):
                return found
    return None


def _equal(*names: str) -> Callable[[Any, int], Fused]:
    """Parts of equal size, one after the other."""
    return lambda module, size: Fused(
        tuple(
            Part(name, size // len(names), _number(module, *_HEAD_SIZES) if name in ("q", "k", "v") else 0)
            for name in names
        )
    )


def _by_head(module: Any, size: int) -> Fused | None:
    """Query, key and value of one head, then those of the next."""
    heads = _number(module, "num_heads", "num_attention_heads")
    if not heads or size % (3 * heads):
        return None
    head = size // (3 * heads)
    return Fused((Part("q", head, head), Part("k", head, head), Part("v", head, head)), heads)


def _grouped_query(module: Any, size: int) -> Fused | None:
    """All queries, then fewer keys and values."""
    heads = _number(module, "num_heads", "num_attention_heads")
    few, head = _number(module, "num_key_value_heads"), _number(module, "head_dim")
    return Fused((Part("q", heads * head, head), Part("k", few * head, head), Part("v", few * head, head)))


def _split(module: Any, size: int) -> Fused | None:
    """GPT-2's, of which a cross attention has keys and values only."""
    names = {2: ("k", "v"), 3: ("q", "k", "v")}.get(size // max(_number(module, "split_size"), 1))
    return _equal(*names)(module, size) if names else None


def _falcon(module: Any, size: int) -> Fused | None:
    head, heads, few = module.head_dim, module.num_heads, module.num_kv_heads
    if module.new_decoder_architecture:
        return Fused((Part("q", heads // few * head, head), Part("k", head, head), Part("v", head, head)), few)
    if module.multi_query:
        return Fused((Part("q", heads * head, head), Part("k", head, head), Part("v", head, head)))
    return _by_head(module, size)


def _bigcode(module: Any, size: int) -> Fused | None:
    if not module.multi_query:
        return _by_head(module, size)
    head, few = module.head_dim, module.kv_dim
    return Fused((Part("q", module.embed_dim, head), Part("k", few, head), Part("v", few, head)))


def _codegen(module: Any, size: int) -> Fused | None:
    """Four blocks, as of four TPU cores, each with its queries, values and keys, in this order."""
    share = size // 12
    return Fused(tuple(Part(name, share, module.head_dim) for name in "qvk"), 4)


def _exaone_vision(module: Any, size: int) -> Fused | None:
    head = _number(module, "head_dim")
    return Fused((Part("q", module.q_dim, head), Part("k", module.kv_dim, head), Part("v", module.kv_dim, head)))


def _gated_query(module: Any, size: int) -> Fused | None:
    """Per head its query, then its gate."""
    head = _number(module, "head_dim")
    if not head or size != 2 * head * _number(getattr(module, "config", None), "num_attention_heads"):
        return None
    return Fused((Part("q", head, head), Part("gate", head, head)), size // (2 * head))


def _compressed(module: Any, size: int) -> Fused | None:
    return Fused((Part("kv", _number(module, "kv_lora_rank")), Part("rope k", _number(module, "qk_rope_head_dim"))))


def _decompressed(module: Any, size: int) -> Fused | None:
    key, value = _number(module, "qk_nope_head_dim"), _number(module, "v_head_dim")
    return Fused((Part("k", key, key), Part("v", value, value)), size // max(key + value, 1))


def _delta_net(module: Any, size: int) -> Fused | None:
    """For each head of the keys: query, key, and the values and gates that go with it."""
    heads, key = module.num_k_heads, module.head_k_dim
    value = module.num_v_heads // heads * module.head_v_dim
    few = module.head_v_dim
    return Fused((Part("q", key, key), Part("k", key, key), Part("v", value, few), Part("z", value, few)), heads)


def _delta_net_gates(module: Any, size: int) -> Fused | None:
    share = module.num_v_heads // module.num_k_heads
    return Fused((Part("b", share), Part("a", share)), module.num_k_heads)


def _delta_net_contiguous(module: Any, size: int) -> Fused | None:
    keys, values = module.key_dim, module.value_dim
    key, value = module.head_k_dim, module.head_v_dim
    return Fused((Part("q", keys, key), Part("k", keys, key), Part("v", values, value)))


def _state_space(module: Any, size: int) -> Fused | None:
    """Mamba 2: gate, input, the two state projections, and time steps."""
    inner, heads = _number(module, "intermediate_size"), _number(module, "num_heads")
    state = _number(module, "n_groups") * _number(module, "ssm_state_size")
    return Fused((Part("gate", inner), Part("x", inner), Part("B", state), Part("C", state), Part("dt", heads)))


def _state_space_inputs(module: Any, size: int) -> Fused | None:
    """Mamba 1: what time steps and the two state projections are made of."""
    state = _number(module, "ssm_state_size")
    return Fused((Part("dt", _number(module, "time_step_rank")), Part("B", state), Part("C", state)))


def _gate_up(module: Any, size: int) -> Fused | None:
    """Gate and up one after the other, or in turns."""
    if not getattr(module, "has_gate", True):
        return None
    # transformers before 5.6 has no attribute for what is in turns.
    if not getattr(module, "is_concatenated", "GptOssExperts" not in _classes(module)):
        return Fused((Part("gate", 1), Part("up", 1)), size // 2)
    return _equal("gate", "up")(module, size)


def _in_turns(module: Any, size: int) -> Fused | None:
    return Fused((Part("x", 1), Part("gate", 1)), size // 2)


_THIRDS = _equal("q", "k", "v")
_HALVES = _equal("gate", "up")

# Names of the projection, classes of the module that uses it, how its output is laid out there. The first that fits.
_RULES: Sequence[tuple[str, str, Callable[[Any, int], Fused | None]]] = (
    ("gate_up_proj", r"", _gate_up),
    ("Wi", r"\bModernBert", _HALVES),
    ("input_linear", r"\b(Granite\w*MLP|(JetMoe|GraniteMoe)MoE|GraniteMoe\w*MoE)\b", _HALVES),
    ("weights_in", r"\bDinov2SwiGLUFFN\b|\bDinov2\w*SwiGLUFFN\b", _HALVES),
    ("fc1", r"\bAriaGroupedExpertsMLP\b", _HALVES),
    ("qkv", r"\bExaone4_5\w*Attention\b", _exaone_vision),
    ("qkv|qkv_linear", r"", _THIRDS),
    ("in_proj_weight", r"\bMultiheadAttention\b", _THIRDS),
    ("att_proj", r"\bBarkSelfAttention\b", _THIRDS),
    ("Wqkv", r"\b(ModernBert|Mpt)\w*Attention\b", _THIRDS),
    ("Wqkv", r"\bDbrxAttention\b", _grouped_query),
    ("qkv_proj", r"\bPhi(3|4Multimodal)\w*Attention\b", _grouped_query),
    ("qkv_proj", r"\bMiniMaxLightningAttention\b", _by_head),
    ("qkv_proj", r"\bCodeGenAttention\b", _codegen),
    ("c_attn", r"\bGPTBigCodeAttention\b", _bigcode),
    ("c_attn", r"Attention\b", _split),
    ("query_key_value", r"\b(GPTNeoX|GPTNeoXJapanese|Bloom|Persimmon)Attention\b", _by_head),
    ("query_key_value", r"\bFalconAttention\b", _falcon),
    ("in_proj", r"\bDisentangledSelfAttention\b", _by_head),
    ("to_kv", r"\b(GraniteSpeech|Evolla)", _equal("k", "v")),
    ("kv_proj", r"\bJetMoeAttention\b", _equal("k", "v")),
    ("q_proj", r"\b(Qwen3Next|Qwen3_5|Qwen3_5Moe)Attention\b", _gated_query),
    ("kv_a_proj_with_mqa", r"", _compressed),
    ("kv_b_proj", r"", _decompressed),
    ("in_proj_qkvz", r"\bQwen3NextGatedDeltaNet\b", _delta_net),
    ("in_proj_ba", r"\bQwen3NextGatedDeltaNet\b", _delta_net_gates),
    ("in_proj_qkv", r"\bQwen3_5\w*GatedDeltaNet\b", _delta_net_contiguous),
    ("in_proj", r"\bLfm\w*ShortConv\b", _equal("B", "C", "x")),
    ("in_proj", r"\bZambaMambaMixer\b", _in_turns),
    ("in_proj", r"\b(Mamba|FalconMamba|Jamba)(Mamba)?Mixer\b", _equal("x", "gate")),
    ("x_proj", r"\b(Mamba|FalconMamba|Jamba)(Mamba)?Mixer\b", _state_space_inputs),
    ("x_proj_weight", r"\bZambaMambaMixer\b", _state_space_inputs),
    ("in_proj", r"(Mamba2\w*|Zamba2MambaMixer|BambaMixer|GraniteMoeHybridMambaLayer|FalconH1Mixer)\b", _state_space),
)
