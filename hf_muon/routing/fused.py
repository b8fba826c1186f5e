"""Find the matrices of a weight that fuses several, or is stored in another order than ``(out, in)``.

The layout is not visible in the weight: some models store fused projections part by part, others head by head, and many
weights are called `qkv`. So the tables name classes of modules, whose forward methods were read: those of text models
and of their vision towers in transformers, torch's attention, timm's ViT, experts of NeMo Automodel. Sizes come from
the module or its config. A weight without a known layout, or whose sizes do not add up, stays one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

# Names of the projections of an attention.
QUERY = re.compile(r"q|query|q_proj|query_proj|to_q|q_b_proj|k|key|k_proj|key_proj|to_k|v|value|v_proj|value_proj|to_v")
HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")


class Part(NamedTuple):
    """One matrix of a fused projection.

    Attributes:
        name: q, k, v, gate, up...
        size: its share of the output dim, per block.
        head: size of its heads; 0 without heads.
    """

    name: str
    size: int
    head: int = 0


@dataclass(frozen=True)
class Fused:
    """The parts along the output dim of a fused projection: equal blocks, each with rows of every part."""

    parts: tuple[Part, ...]
    blocks: int = 1

    @property
    def size(self) -> int:
        return self.blocks * sum(part.size for part in self.parts)

    @property
    def names(self) -> str:
        return ", ".join(part.name for part in self.parts)

    def sizes(self, per_head: bool) -> str:
        """Return the sizes in the words of a view."""
        if not per_head or not any(part.head for part in self.parts):
            sizes = "+".join(str(part.size) for part in self.parts)
            return sizes if self.blocks == 1 else f"{self.blocks}*({sizes})"
        heads = [part.head or part.size for part in self.parts for _ in range(part.size // (part.head or part.size))]
        if len(set(heads)) == 1:
            return f"{self.blocks * len(heads)}x{heads[0]}"
        if self.blocks > 1:
            return f"{self.blocks}x({'+'.join(map(str, heads))})"
        return "+".join(f"{part.size // part.head}x{part.head}" if part.head else str(part.size) for part in self.parts)


class WeightLayout(NamedTuple):
    """How a weight is stored.

    Attributes:
        transposed: stored as ``(in, out)``.
        fused: the projections along its output dim; None for a single one.
        below: number of matrices (experts, groups) stacked along the rows of a 2-D weight; 0 for a single one.
        stack: a 3-D weight is known to be a stack of matrices.
    """

    transposed: bool = False
    fused: Fused | None = None
    below: int = 0
    stack: bool = False


def read_as(module: nn.Module) -> str:
    """Return the name of the class whose forward method a module runs; empty for other packages than are named here.

    The forward method determines the layout of a weight. So a subclass counts as its base class, unless it overrides
    `forward`. Classes of timm and NeMo Automodel have their full names, because many share one.
    """
    base = next(base for base in type(module).__mro__ if "forward" in vars(base))
    if base.__module__.startswith(("timm.", "nemo_automodel.")):
        return f"{base.__module__}.{base.__name__}"
    return base.__name__ if base.__module__.startswith(("transformers.", "torch.nn.")) else ""


def number(module: Any, *names: str) -> int:
    """Return the first of these attributes that a module or its config has; 0 if none."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):  # a bool is an int
                return value
    return 0


Cut = Callable[[Any, int], Fused | None]
"""From a module and a number of rows to the parts; None if the module does not have such rows."""


def _equal(*names: str) -> Cut:
    """Return a cut into consecutive equal parts."""
    return lambda module, size: Fused(
        tuple(
            Part(name, size // len(names), number(module, *HEAD_SIZES) if name in ("q", "k", "v") else 0)
            for name in names
        )
    )


def _parts(**sizes: str) -> Cut:
    """Return a cut into parts whose sizes are attributes of the module."""
    return lambda module, size: Fused(
        tuple(Part(name.replace("_", " "), number(module, attr)) for name, attr in sizes.items())
    )


def _qkv(queries: int, key_rows: int, head: int, blocks: int = 1) -> Fused:
    """Return parts with numbers of rows for queries, keys and values; keys and values have equally many."""
    return Fused((Part("q", queries, head), Part("k", key_rows, head), Part("v", key_rows, head)), blocks)


def _by_head(module: Any, size: int) -> Fused | None:
    """Split head by head: query, key and value of one head, then those of the next."""
    heads = number(module, "num_heads", "num_attention_heads")
    head = size // (3 * heads) if heads else 0
    return _qkv(head, head, head, heads)


def _grouped_query(module: Any, size: int) -> Fused | None:
    """Split into all queries, then fewer keys and values."""
    heads = number(module, "num_heads", "num_attention_heads")
    key_heads, head = number(module, "num_key_value_heads"), number(module, "head_dim")
    return _qkv(heads * head, key_heads * head, head)


def _split(module: Any, size: int) -> Fused | None:
    """Split as GPT-2 does; its cross attention has only keys and values."""
    names = {2: ("k", "v"), 3: ("q", "k", "v")}.get(size // max(number(module, "split_size"), 1))
    return _equal(*names)(module, size) if names else None


def _falcon(module: Any, size: int) -> Fused | None:
    head, heads, key_heads = module.head_dim, module.num_heads, module.num_kv_heads
    if module.new_decoder_architecture:
        return _qkv(heads // key_heads * head, head, head, key_heads)
    if module.multi_query:
        return _qkv(heads * head, head, head)
    return _by_head(module, size)


def _bigcode(module: Any, size: int) -> Fused | None:
    if not module.multi_query:
        return _by_head(module, size)
    return _qkv(module.embed_dim, module.kv_dim, module.head_dim)


def _codegen(module: Any, size: int) -> Fused | None:
    """Split into four blocks, one per TPU core, each with its queries, values and keys, in this order."""
    share = size // 12
    return Fused(tuple(Part(name, share, module.head_dim) for name in "qvk"), 4)


def _gated_query(module: Any, size: int) -> Fused | None:
    """Split per head: query, then the gate of the values."""
    query, gate = number(module, "qk_head_dim", "head_dim"), number(module, "v_head_dim", "head_dim")
    heads = number(getattr(module, "config", None), "num_attention_heads")
    return Fused((Part("q", query, query), Part("gate", gate, gate)), heads)


def _of_indexer(module: Any, size: int) -> Fused | None:
    head = module.index_head_dim
    return Fused((Part("queries", module.index_n_heads * head), Part("keys", module.index_kv_heads * head)))


def _streams(module: Any, size: int) -> Fused | None:
    """Split into one matrix per residual stream."""
    return _equal(*(f"stream {i}" for i in range(module.hc_count)))(module, size)


def _decompressed(module: Any, size: int) -> Fused | None:
    key, value = number(module, "qk_nope_head_dim"), number(module, "v_head_dim")
    return Fused((Part("k", key, key), Part("v", value, value)), size // max(key + value, 1))


def _delta_net(module: Any, size: int) -> Fused | None:
    """Split per key head: query, key, then the values and gates of that head."""
    heads, key = module.num_k_heads, module.head_k_dim
    value = module.num_v_heads // heads * module.head_v_dim
    head = module.head_v_dim
    return Fused((Part("q", key, key), Part("k", key, key), Part("v", value, head), Part("z", value, head)), heads)


def _delta_net_gates(module: Any, size: int) -> Fused | None:
    share = module.num_v_heads // module.num_k_heads
    return Fused((Part("b", share), Part("a", share)), module.num_k_heads)


def _delta_net_contiguous(module: Any, size: int) -> Fused | None:
    keys, values = module.key_dim, module.value_dim
    key, value = module.head_k_dim, module.head_v_dim
    return Fused((Part("q", keys, key), Part("k", keys, key), Part("v", values, value)))


def _state_space(module: Any, size: int) -> Fused | None:
    """Split Mamba 2: gate, input, the two state projections, and time steps."""
    inner, heads = number(module, "intermediate_size"), number(module, "num_heads")
    state = number(module, "n_groups") * number(module, "ssm_state_size")
    return Fused((Part("gate", inner), Part("x", inner), Part("B", state), Part("C", state), Part("dt", heads)))


def _experts(module: Any, size: int) -> Fused | None:
    """Split as transformers' `use_experts_implementation` says: gate and up consecutive or interleaved."""
    if not getattr(module, "has_gate", False):
        return None
    # transformers before 5.6 has no attribute for interleaved rows.
    if not getattr(module, "is_concatenated", read_as(module) != "GptOssExperts"):
        return _IN_TURNS(module, size)
    return _HALVES(module, size)


def _nemo_experts(module: Any, size: int) -> Fused | None:
    """Split as the activation reads: gate and up interleaved or consecutive; only up if there is no gate."""
    if module.config.expert_activation == "quick_geglu":
        return _IN_TURNS(module, size)
    return _HALVES(module, size) if module.is_gated else None


def _in_turns(*names: str) -> Cut:
    """Return a cut into parts whose rows take turns."""
    return lambda module, size: Fused(tuple(Part(name, 1) for name in names), size // len(names))


_THIRDS = _equal("q", "k", "v")
_HALVES = _equal("gate", "up")
_IN_TURNS = _in_turns("gate", "up")


def _each(names: str, ending: str) -> tuple[str, ...]:
    return tuple(f"{name}{ending}" for name in names.split())


_NEMO = (
    "nemo_automodel.components.moe.experts.GroupedExperts",
    "nemo_automodel.components.moe.experts.GroupedExpertsDeepEP",
)
# Classes that read `qkv` as (..., 3, heads, size of a head), or in three chunks.
_QKV = (
    "VisionAttention",  # Qwen2-VL
    *_each(
        "CohereCompass DeepseekOcr2Sam Dots3Note Ernie4_5_VLMoe Glm4v Glm4vMoe Glm5Next GlmImage GlmOcr GotOcr2 "
        "PPFormulaNet Qwen2_5_VL Qwen3_5 Qwen3_5Moe Qwen3OmniMoe Qwen3VL Qwen3VLMoe Qwen4Exp SLANeXt Sam SamHQ "
        "UnlimitedOcrSam",
        "VisionAttention",
    ),
    *_each("DeepseekOcr2Sam Sam SamHQ UnlimitedOcrSam", "VisionSdpaAttention"),
    *_each("Blip Blip2 InstructBlip InstructBlipVideo", "Attention"),
    *("timm.layers.attention.Attention", "timm.layers.attention.AttentionRope"),
    *("timm.models.beit.Attention", "timm.models.eva.EvaAttention"),
)
_LATENT = (
    *_each(
        "AXK1 AXK2 BailingHybrid DeepseekV2 DeepseekV3 DeepseekV32 Dots3NoteText Glm4MoeLite Glm5NextText GlmMoeDsa "
        "HYV4 KimiLinear MiniCPM3 Mistral4 MistralLarge4Text Youtu",
        "Attention",
    ),
    *("LongcatFlashMLA", "nemo_automodel.components.models.deepseek_v3.layers.MLA"),
)
_GATE_UP = (
    *_each("Glm Glm4 Glm4vText GlmImageText GlmOcrText MiniMaxM3VLDense Phi3 Phi4Multimodal Zamba2", "MLP"),
    *("Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts"),
)
_GRANITE = (
    *_each("GraniteMoe GraniteMoeHybrid GraniteMoeShared JetMoe", "MoE"),
    *_each("GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared", "MLP"),
)
_MAMBA = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
_MAMBA2 = (
    *("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer", "NemotronHMamba2Mixer"),
    "Zamba2MambaMixer",
)
_SSM_INPUTS = _parts(dt="time_step_rank", B="ssm_state_size", C="ssm_state_size")

# Name of the projection, classes (as returned by `read_as`) of the module that uses it, and the layout of its output.
CUTS: Sequence[tuple[str, Sequence[str], Cut]] = (
    ("gate_up_proj", _GATE_UP, _HALVES),
    ("gate_and_up_projs", _NEMO, _nemo_experts),
    ("Wi", ("ModernBertMLP", "ModernBertDecoderMLP"), _HALVES),
    ("input_linear", _GRANITE, _HALVES),
    ("fc1", ("AriaExperts",), _HALVES),
    ("qkv", _QKV, _THIRDS),
    ("qkv", ("Exaone4_5_VisionAttention",), _grouped_query),
    ("in_proj_weight", ("MultiheadAttention",), _THIRDS),
    ("Wqkv", ("ModernBertAttention", "MptAttention"), _THIRDS),
    ("Wqkv", ("DbrxAttention",), _grouped_query),
    ("qkv_proj", ("Phi3Attention", "Phi4MultimodalAttention"), _grouped_query),
    ("qkv_proj", ("MiniMaxLightningAttention",), _by_head),
    ("qkv_proj", ("CodeGenAttention",), _codegen),
    ("c_attn", ("GPTBigCodeAttention",), _bigcode),
    ("c_attn", ("GPT2Attention", "Attention"), _split),  # OpenAI's GPT has the second
    ("query_key_value", _each("Bloom GPTNeoX GPTNeoXJapanese Persimmon", "Attention"), _by_head),
    ("query_key_value", ("FalconAttention", "FalconFlashAttention2"), _falcon),
    ("in_proj", ("DisentangledSelfAttention",), _by_head),  # DeBERTa
    ("kv_proj", ("JetMoeAttention",), _equal("k", "v")),
    ("q_proj", _each("Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4ExpText", "Attention"), _gated_query),
    ("q_gate_proj", ("AXK2Attention",), _gated_query),
    ("index_qk_proj", ("Qwen4ExpTextQSAIndexer",), _of_indexer),
    ("kv_a_proj_with_mqa", _LATENT, _parts(kv="kv_lora_rank", rope_k="qk_rope_head_dim")),
    ("kv_b_proj", _LATENT, _decompressed),
    ("in_proj_qkvz", ("Qwen3NextGatedDeltaNet",), _delta_net),
    ("in_proj_ba", ("Qwen3NextGatedDeltaNet",), _delta_net_gates),
    ("in_proj_qkv", _each("Qwen3_5 Qwen3_5Moe Qwen4ExpText", "GatedDeltaNet"), _delta_net_contiguous),
    ("in_proj", _each("Lfm2 Lfm2Moe Lfm3", "ShortConv"), _equal("B", "C", "x")),
    ("in_proj", ("ZambaMambaMixer",), _in_turns("x", "gate")),
    ("in_proj", _MAMBA, _equal("x", "gate")),
    ("x_proj", _MAMBA, _SSM_INPUTS),
    ("x_proj_weight", ("ZambaMambaMixer",), _SSM_INPUTS),
    ("in_proj", _MAMBA2, _state_space),
    ("input_mix_weight_up", ("Qwen4ExpTextGatedResidual",), _streams),
    ("key_proj", ("Qwen4ExpTextPLELayer",), _streams),
)
_CUT_OF = {(name, own): cut for name, classes, cut in CUTS for own in classes}

# Classes and names of weights, and the dims that these are stored in.
_IN_OUT, _STACK = WeightLayout(transposed=True), WeightLayout(stack=True)
STORED: dict[tuple[str, str], WeightLayout] = {
    ("Conv1D", "weight"): _IN_OUT,
    ("AriaGroupedExpertsGemm", "weight"): _IN_OUT,
    ("Llama4TextExperts", "gate_up_proj"): _IN_OUT,
    ("Llama4TextExperts", "down_proj"): _IN_OUT,
    **{(own, name): _IN_OUT for own in _NEMO for name in ("gate_and_up_projs", "down_projs")},
    ("DbrxExpertGLU", "w2"): _IN_OUT,
    ("Gemma3MultiModalProjector", "mm_input_projection_weight"): _IN_OUT,
    ("T5Gemma2MultiModalProjector", "mm_input_projection_weight"): _IN_OUT,
    ("RecurrentGemmaRglru", "input_gate_weight"): WeightLayout(transposed=True, stack=True),
    ("RecurrentGemmaRglru", "recurrent_gate_weight"): WeightLayout(transposed=True, stack=True),
    ("ZambaMambaMixer", "x_proj_weight"): _STACK,
    ("ZambaMambaMixer", "dt_proj_weight"): _STACK,
}
# Classes whose weights are several matrices stacked along the rows, and the attribute with their number.
BELOW = {"DbrxExpertGLU": "moe_num_experts", "DeepseekV4GroupedLinear": "n_groups"}


def layout_of(shape: Sequence[int], name: str, owner: nn.Module, leaf: str, parent: nn.Module | None) -> WeightLayout:
    """Return how a weight is stored.

    Args:
        shape: whole shape of the weight.
        name: the name of the parameter in its owner, usually `weight`.
        owner: the module that holds the parameter.
        leaf: name of the owner in the module around it.
        parent: the module around it.
    """
    class_name = read_as(owner)
    stored = STORED.get((class_name, name), WeightLayout())
    transposed = stored.transposed or bool(class_name and getattr(owner, "is_transposed", False))
    # The module that uses a linear layer knows its layout; a parameter of its own name is used where it is.
    holder, word = (parent, leaf) if name == "weight" else (owner, name)
    fused = _fused(word, holder, shape[-1 if transposed else -2]) if holder is not None and len(shape) < 4 else None
    below = number(owner, BELOW[class_name]) if class_name in BELOW else 0
    return stored._replace(transposed=transposed, fused=fused, below=below)


def heads_of(leaf: str, parent: nn.Module | None, rows: int) -> Fused | None:
    """Return the heads of a query, key or value projection that is not fused; None if heads are unknown."""
    # With compressed keys, `head_dim` is only a part of a query's head.
    sizes = ("qk_head_dim", *HEAD_SIZES) if leaf.startswith("q") else HEAD_SIZES
    head = number(parent, *sizes) if parent is not None and QUERY.fullmatch(leaf) else 0
    return Fused((Part("head", rows, head),)) if head and rows > head and rows % head == 0 else None


def _fused(word: str, module: nn.Module, size: int) -> Fused | None:
    class_name = read_as(module)
    cut = _CUT_OF.get((word, class_name), _experts if class_name and word == "gate_up_proj" else None)
    fused = cut(module, size) if cut is not None else None
    # Sizes that do not add up are those of another class: one matrix is safer than wrong ones.
    is_whole = fused is not None and fused.size == size and all(part.size > 0 for part in fused.parts)
    return fused if is_whole else None
