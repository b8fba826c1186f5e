"""Which layouts of weights are known, as they were read in the forward methods of transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_muon.routing.parts import Fused, Part
from hf_muon.storage.tensors import shape_of

HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")

# Classes of modules by the name of a weight: those in which it is (in, out),
TRANSPOSED = {
    "weight": ("Conv1D", "AriaGroupedExpertsGemm"),
    "gate_up_proj": ("Llama4TextExperts",),
    "down_proj": ("Llama4TextExperts",),
    "mm_input_projection_weight": ("Gemma3MultiModalProjector",),
    "input_gate_weight": ("RecurrentGemmaRglru",),
    "recurrent_gate_weight": ("RecurrentGemmaRglru",),
    "r_kernel": ("FunnelRelMultiheadAttention",),
    **dict.fromkeys("qkvr", ("XLNetRelativeAttention",)),
}
# those in which it is a matrix for each head, or codebook,
STACKS = {
    "weight": ("MoshiFlexibleLinear", "KyutaiSpeechToTextFlexibleLinear"),
    "x_proj_weight": ("ZambaMambaMixer",),
    "dt_proj_weight": ("ZambaMambaMixer",),
    "input_gate_weight": ("RecurrentGemmaRglru",),
    "recurrent_gate_weight": ("RecurrentGemmaRglru",),
}
# and those in which it is (hidden, heads, size of a head).
FLAT = {
    "r_kernel": ("FunnelRelMultiheadAttention",),
    **dict.fromkeys("qkvor", ("XLNetRelativeAttention",)),
}


def classes_of(module: nn.Module) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}


def number(module: Any, *names: str) -> int:
    """Return the first of these attributes that a module or its config has; 0 if none."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return 0


def _equal(*names: str) -> Callable[[Any, int], Fused]:
    """Return a rule that splits into equal parts, one after the other."""
    return lambda module, size: Fused(
        tuple(
            Part(name, size // len(names), number(module, *HEAD_SIZES) if name in ("q", "k", "v") else 0)
            for name in names
        )
    )


def _halves(follower: str, *names: str) -> Callable[[Any, int], Fused | None]:
    """Split into two equal parts if the matrix that follows reads one of them."""

    def rule(module: Any, size: int) -> Fused | None:
        shapes = [shape_of(parameter) for parameter in getattr(module, follower, nn.Identity()).parameters()]
        # Of a convolution of one token, (out, in, 1); of a stack, (B, out, in).
        read = [shape[1] if shape[-1] == 1 else shape[-1] for shape in shapes if len(shape) > 1]
        return _equal(*names)(module, size) if [2 * columns for columns in read] == [size] else None

    return rule


def _by_head(module: Any, size: int) -> Fused | None:
    """Query, key and value of one head, then those of the next."""
    heads = number(module, "num_heads", "num_attention_heads")
    if not heads or size % (3 * heads):
        return None
    head = size // (3 * heads)
    return Fused((Part("q", head, head), Part("k", head, head), Part("v", head, head)), heads)


def _grouped_query(module: Any, size: int) -> Fused | None:
    """Split into all queries, then fewer keys and values."""
    heads = number(module, "num_heads", "num_attention_heads")
    few, head = number(module, "num_key_value_heads"), number(module, "head_dim")
    return Fused((Part("q", heads * head, head), Part("k", few * head, head), Part("v", few * head, head)))


def _split(module: Any, size: int) -> Fused | None:
    """Split as GPT-2 does; its cross attention has keys and values only."""
    names = {2: ("k", "v"), 3: ("q", "k", "v")}.get(size // max(number(module, "split_size"), 1))
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
    head = number(module, "head_dim")
    return Fused((Part("q", module.q_dim, head), Part("k", module.kv_dim, head), Part("v", module.kv_dim, head)))


def _gated_query(module: Any, size: int) -> Fused | None:
    """Per head its query, then its gate."""
    head = number(module, "head_dim")
    if not head or size != 2 * head * number(getattr(module, "config", None), "num_attention_heads"):
        return None
    return Fused((Part("q", head, head), Part("gate", head, head)), size // (2 * head))


def _compressed(module: Any, size: int) -> Fused | None:
    return Fused((Part("kv", number(module, "kv_lora_rank")), Part("rope k", number(module, "qk_rope_head_dim"))))


def _decompressed(module: Any, size: int) -> Fused | None:
    key, value = number(module, "qk_nope_head_dim"), number(module, "v_head_dim")
    return Fused((Part("k", key, key), Part("v", value, value)), size // max(key + value, 1))


def _delta_net(module: Any, size: int) -> Fused | None:
    """Split per key head: query, key, then the values and gates of that head."""
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
    inner, heads = number(module, "intermediate_size"), number(module, "num_heads")
    state = number(module, "n_groups") * number(module, "ssm_state_size")
    return Fused((Part("gate", inner), Part("x", inner), Part("B", state), Part("C", state), Part("dt", heads)))


def _state_space_inputs(module: Any, size: int) -> Fused | None:
    """Mamba 1: what time steps and the two state projections are made of."""
    state = number(module, "ssm_state_size")
    return Fused((Part("dt", number(module, "time_step_rank")), Part("B", state), Part("C", state)))


def _gate_up(module: Any, size: int) -> Fused | None:
    """Gate and up one after the other, or in turns."""
    if not getattr(module, "has_gate", True):
        return None
    # transformers before 5.6 has no attribute for what is in turns.
    if not getattr(module, "is_concatenated", "GptOssExperts" not in classes_of(module)):
        return Fused((Part("gate", 1), Part("up", 1)), size // 2)
    return _equal("gate", "up")(module, size)


def _levit(module: Any, size: int) -> Fused | None:
    """Per head its query, its key and a larger value; of the attention that makes a grid smaller, without the query."""
    key, value = module.key_dim, module.attention_ratio * module.key_dim
    names = ("q", "k") if size // max(module.num_attention_heads, 1) == 2 * key + value else ("k",)
    parts = [Part(name, key, key) for name in names]
    return Fused((*parts, Part("v", value, value)), module.num_attention_heads)


def _focal(module: Any, size: int) -> Fused | None:
    """Split into query, context, and one gate per level of the context."""
    return Fused((Part("q", module.dim), Part("context", module.dim), Part("gates", module.focal_level + 1)))


def _in_turns(module: Any, size: int) -> Fused | None:
    return Fused((Part("x", 1), Part("gate", 1)), size // 2)


_THIRDS = _equal("q", "k", "v")
_HALVES = _equal("gate", "up")
# torch.nn.GLU: what the first half says goes through as far as the second one opens.
_GLU = ("value", "gate")

# Names of the projection, classes of the module that uses it, how its output is laid out there. The first that fits.
RULES: Sequence[tuple[str, str, Callable[[Any, int], Fused | None]]] = (
    ("gate_up_proj", r"", _gate_up),
    ("Wi", r"\bModernBert", _HALVES),
    ("input_linear", r"\b(Granite\w*MLP|(JetMoe|GraniteMoe)MoE|GraniteMoe\w*MoE)\b", _HALVES),
    ("weights_in", r"\bDinov2SwiGLUFFN\b|\bDinov2\w*SwiGLUFFN\b", _HALVES),
    ("fc1", r"\bAriaGroupedExpertsMLP\b", _HALVES),
    ("fc1", r"\b(Moshi|KyutaiSpeechToText)GatingMLP\b", _halves("fc2", "gate", "up")),
    ("fc1", r"", _halves("fc2", "up", "gate")),
    ("linear_1", r"\bCohere2VisionMultiModalProjector\b", _halves("linear_2", "up", "gate")),
    ("pointwise_conv1", r"", _halves("pointwise_conv2", *_GLU)),
    ("pointwise_lin1", r"", _halves("pointwise_lin2", *_GLU)),
    ("up_conv", r"\bGraniteSpeech\w*ConformerConvModule\b", _halves("down_conv", *_GLU)),
    ("linear_start", r"\bGemma\w*LightConv1d\b", _halves("linear_end", *_GLU)),
    ("ext_pw_conv_1d", r"\bPhi4MultimodalAudioGluPointWiseConv\b", _equal(*_GLU)),
    ("residual_conv|self_attn_conv", r"\bSeamlessM4T\w*ConformerAdapterLayer\b", _equal(*_GLU)),
    ("conv_layers", r"\bConv1dSubsampler\b", _equal(*_GLU)),
    ("in_layers", r"\bVitsWaveNet\b", _equal(*_GLU)),
    (r"weight_[ih]h(_l\d+(_reverse)?)?", r"\bLSTM(Cell)?\b", _equal("input", "forget", "cell", "output")),
    (r"weight_[ih]h(_l\d+(_reverse)?)?", r"\bGRU(Cell)?\b", _equal("reset", "update", "new")),
    ("queries_keys_values", r"\bLevitAttention\b", _levit),
    ("keys_values", r"\bLevitAttentionSubsample\b", _levit),
    ("projection_in", r"\bFocalNetModulation\b", _focal),
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
