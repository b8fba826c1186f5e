"""Find the matrices of a weight that fuses several, or is stored in another order than ``(out, in)``.

The layout is not visible in the weight: some models store fused projections part by part, others head by head, and many
weights are called `qkv`. The rules are per class of module, from the forward methods of transformers, timm, diffusers
and torch. Sizes come from the module or its config. A weight without a known layout, or whose sizes do not add up,
stays one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import nn

from hf_muon.storage.tensors import shape_of

_T = TypeVar("_T")

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
        flat: a 3-D weight is known to be a matrix whose columns are split into two dims.
    """

    transposed: bool = False
    fused: Fused | None = None
    below: int = 0
    stack: bool = False
    flat: bool = False


_NEMO = (
    "nemo_automodel.components.moe.experts.GroupedExperts nemo_automodel.components.moe.experts.GroupedExpertsDeepEP"
)
# Names of a weight, classes (as returned by `read_as`) that hold it, and how it is stored there: `transposed`, as (in,
# out); `stack`, a matrix for each head or codebook; `flat`, as (hidden, heads, size of a head).
STORED: Sequence[tuple[str, str, str]] = (
    ("weight", "Conv1D AriaGroupedExpertsGemm", "transposed"),
    ("gate_up_proj|down_proj", "Llama4TextExperts", "transposed"),
    ("gate_and_up_projs|down_projs", _NEMO, "transposed"),
    ("w2", "DbrxExpertGLU", "transposed"),
    ("mm_input_projection_weight", "Gemma3MultiModalProjector T5Gemma2MultiModalProjector", "transposed"),
    ("(input|recurrent)_gate_weight", "RecurrentGemmaRglru", "transposed stack"),
    ("r_kernel", "FunnelRelMultiheadAttention", "transposed flat"),
    ("[qkvr]", "XLNetRelativeAttention", "transposed flat"),
    ("o", "XLNetRelativeAttention", "flat"),
    ("weight", "MoshiFlexibleLinear KyutaiSpeechToTextFlexibleLinear", "stack"),
    ("(x|dt)_proj_weight", "ZambaMambaMixer", "stack"),
)
# Classes whose weights are several matrices stacked along the rows, and the attribute with their number.
BELOW = {"DbrxExpertGLU": "moe_num_experts", "DeepseekV4GroupedLinear": "n_groups"}


def read_as(module: nn.Module) -> str:
    """Return the name of the class whose forward method a module runs; empty for other packages than are named here.

    The forward method determines the layout of a weight. So a subclass counts as its base class, unless it overrides
    `forward`. Classes of timm, diffusers and NeMo Automodel have their full names, because many share one.
    """
    base = next(base for base in type(module).__mro__ if "forward" in vars(base))
    if base.__module__.startswith(("timm.", "diffusers.", "nemo_automodel.")):
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


def _equal(*names: str) -> Callable[[Any, int], Fused]:
    """Return a rule that splits into consecutive equal parts."""
    return lambda module, size: Fused(
        tuple(
            Part(name, size // len(names), number(module, *HEAD_SIZES) if name in ("q", "k", "v") else 0)
            for name in names
        )
    )


def _parts(**sizes: str) -> Callable[[Any, int], Fused]:
    """Return a rule that splits into parts whose sizes are attributes of the module; without one, into a single row."""
    return lambda module, size: Fused(
        tuple(Part(name.replace("_", " "), number(module, attr) if attr else 1) for name, attr in sizes.items())
    )


def _halves(follower: str, *names: str) -> Callable[[Any, int], Fused | None]:
    """Split into two equal parts if the next matrix reads the width of one of them."""

    def rule(module: Any, size: int) -> Fused | None:
        shapes = [shape_of(parameter) for parameter in getattr(module, follower, nn.Identity()).parameters()]
        # Of a convolution of one token, (out, in, 1); of a stack, (B, out, in).
        read = [shape[1] if shape[-1] == 1 else shape[-1] for shape in shapes if len(shape) > 1]
        return _equal(*names)(module, size) if [2 * columns for columns in read] == [size] else None

    return rule


def _qkv(queries: int, key_rows: int, head: int, blocks: int = 1) -> Fused:
    """Return parts with numbers of rows for queries, keys and values; keys and values have equally many."""
    return Fused((Part("q", queries, head), Part("k", key_rows, head), Part("v", key_rows, head)), blocks)


def _by_head(module: Any, size: int, names: str = "qkv") -> Fused | None:
    """Split head by head: query, key and value of one head, then those of the next."""
    heads = number(module, "num_heads", "num_attention_heads")
    head = size // (len(names) * heads) if heads else 0
    return Fused(tuple(Part(name, head, head) for name in names), heads)


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


def _residual_skip(module: Any, size: int) -> Fused | None:
    """Split into halves, except for the last layer, which has no residual."""
    return _equal("residual", "skip")(module, size) if size == 2 * module.hidden_size else None


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


def _levit(module: Any, size: int) -> Fused | None:
    """Split per head: query, key and a larger value; without the query in attentions that downsample."""
    key, value = module.key_dim, module.attention_ratio * module.key_dim
    names = ("q", "k") if size // max(module.num_attention_heads, 1) == 2 * key + value else ("k",)
    parts = [Part(name, key, key) for name in names]
    return Fused((*parts, Part("v", value, value)), module.num_attention_heads)


def _focal(module: Any, size: int) -> Fused | None:
    """Split into query, context, and one gate per level of the context."""
    return Fused((Part("q", module.dim), Part("context", module.dim), Part("gates", module.focal_level + 1)))


def _in_turns(*names: str) -> Callable[[Any, int], Fused]:
    return lambda module, size: Fused(tuple(Part(name, 1) for name in names), size // len(names))


def _maxvit(module: Any, size: int) -> Fused | None:
    return (_by_head if module.head_first else _THIRDS)(module, size)


_THIRDS = _equal("q", "k", "v")
_HALVES = _equal("gate", "up")
_IN_TURNS = _in_turns("gate", "up")
_KV = _equal("k", "v")
_SSM_INPUTS = _parts(dt="time_step_rank", B="ssm_state_size", C="ssm_state_size")
# torch.nn.GLU: the first half is the value, the second half the gate.
_GLU = ("value", "gate")
_UP_GATE = ("up", "gate")
_SIDES = _equal("left", "right")


def _modulations(count: int) -> Callable[[Any, int], Fused]:
    """Split into the shifts, scales and gates of adaptive norms."""
    return _equal(*(f"modulation {i + 1}" for i in range(count)))


def _each(names: str, ending: str = "", start: str = "") -> str:
    return " ".join(f"{start}{name}{ending}" for name in names.split())


# Classes that read `qkv` as (..., 3, heads, size of a head), or in three chunks.
_QKV = " ".join(
    (
        "VisionAttention",  # Qwen2-VL
        _each(
            "CohereCompass DeepseekOcr2Sam Dots3Note Ernie4_5_VLMoe Glm4v Glm4vMoe Glm5Next GlmImage GlmOcr GotOcr2 "
            "PPFormulaNet Qwen2_5_VL Qwen3_5 Qwen3_5Moe Qwen3OmniMoe Qwen3VL Qwen3VLMoe Qwen4Exp SLANeXt Sam SamHQ "
            "UnlimitedOcrSam",
            "VisionAttention",
        ),
        _each("DeepseekOcr2Sam Sam SamHQ UnlimitedOcrSam", "VisionSdpaAttention"),
        _each(
            "Blip Blip2 Florence2VisionChannel Florence2VisionWindow HieraMaskUnit InstructBlip InstructBlipVideo "
            "Mgpstr PPOCRV5MobileRec PPOCRV5ServerRec PPOCRV6SmallRec Sam2MultiScale SegGpt TimesformerSelf VitDet",
            "Attention",
        ),
        _each(
            "attention.Attention attention.AttentionRope attention_pool2d.AttentionPool2d "
            "attention_pool2d.RotAttentionPool2d diff_attention.DiffAttention",
            start="timm.layers.",
        ),
        _each(
            "beit.Attention cait.TalkingHeadAttn coat.FactorAttnConvRelPosEnc convit.MHSA davit.ChannelAttention "
            "davit.ChannelAttentionV2 davit.WindowAttention edgenext.CrossCovarianceAttn eva.EvaAttention "
            "fastvit.Attention hiera.MaskUnitAttention hieradet_sam2.MultiScaleAttention metaformer.Attention "
            "mvitv2.MultiScaleAttention nest.Attention swin_transformer.WindowAttention "
            "swin_transformer_v2.WindowAttention swin_transformer_v2_cr.WindowMultiHeadAttention "
            "twins.LocallyGroupedAttn visformer.Attention vision_transformer_relpos.RelPosAttention "
            "vision_transformer_sam.Attention volo.Attention xcit.XCA",
            start="timm.models.",
        ),
    )
)
_LATENT = "LongcatFlashMLA nemo_automodel.components.models.deepseek_v3.layers.MLA " + _each(
    "AXK1 AXK2 BailingHybrid DeepseekV2 DeepseekV3 DeepseekV32 Dots3NoteText Glm4MoeLite Glm5NextText GlmMoeDsa HYV4 "
    "KimiLinear MiniCPM3 Mistral4 MistralLarge4Text Youtu",
    "Attention",
)
_GATE_UP = "EsmFold2SwiGLU Llama4TextExperts LongcatFlashExperts Step3p7Experts " + _each(
    "Dia Dots3NoteAudio Glm Glm4 Glm4vText GlmImageText GlmOcrText MiniMaxM3VLDense Phi3 Phi4Multimodal Zamba2", "MLP"
)
_CONFORMER = _each(
    "FastSpeech2Conformer LasrEncoder NemotronAsrStreamingEncoder ParakeetEncoder SeamlessM4TConformer "
    "SeamlessM4Tv2Conformer Wav2Vec2Bert Wav2Vec2Conformer",
    "ConvolutionModule",
)
_MAMBA = "MambaMixer FalconMambaMixer JambaMambaMixer"
_CSP = "DFineRepNCSPELAN4 Deimv2CSPRepLayer Deimv2RepNCSPELAN5 LwDetrC2FLayer RfDetrC2FLayer"
_ADA = "diffusers.models.normalization."
_ADA_2 = "AdaGroupNorm AdaLayerNorm AdaLayerNormContinuous"
_ADA_6 = "AdaLayerNormSingle AdaLayerNormZero CogVideoXLayerNormZero"
_MAMBA2 = "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer NemotronHMamba2Mixer Zamba2MambaMixer"

# Names of the projection, classes (as returned by `read_as`) of the module that uses it, and the layout of its output
# there. The first match counts. `*` is any class of these packages.
RULES: Sequence[tuple[str, str, Callable[[Any, int], Fused | None]]] = (
    ("gate_up_proj", "*", _experts),
    ("gate_up_proj", _GATE_UP, _HALVES),
    ("gate_up_proj", "Phi4MultimodalAudioMLP", _equal("up", "gate")),
    ("gate_and_up_projs", _NEMO, _nemo_experts),
    ("Wi", "ModernBertMLP ModernBertDecoderMLP", _HALVES),
    ("input_linear", _each("GraniteMoe GraniteMoeHybrid GraniteMoeShared JetMoe", "MoE"), _HALVES),
    ("input_linear", _each("GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared", "MLP"), _HALVES),
    ("weights_in", "Dinov2SwiGLUFFN Dinov2WithRegistersSwiGLUFFN EomtSwiGLUFFN", _HALVES),
    ("weights_in", "VideomtGatedMLP VideomtSwiGLUFFN", _HALVES),
    ("fc1", "AriaExperts", _HALVES),
    ("fc1", "MoshiGatingMLP KyutaiSpeechToTextGatingMLP", _halves("fc2", "gate", "up")),
    ("fc1", "ClvpEncoderMLP MoonshineDecoderMLP MoonshineStreamingDecoderMLP", _halves("fc2", *_UP_GATE)),
    ("fc1", "timm.layers.mlp.GluMlp timm.layers.mlp.GatedMlp", _halves("fc2", *_UP_GATE)),
    ("linear_1", "AyaVisionMultiModalProjector Cohere2VisionMultiModalProjector", _halves("linear_2", *_UP_GATE)),
    ("proj", "ClvpGatedLinearUnit", _equal(*_UP_GATE)),
    ("proj", _each("GEGLU SwiGLU", start="diffusers.models.activations."), _equal(*_UP_GATE)),
    ("pointwise_conv1", _CONFORMER, _halves("pointwise_conv2", *_GLU)),
    ("pointwise_lin1", "GraniteSpeech5EncoderConvolutionModule", _halves("pointwise_lin2", *_GLU)),
    ("up_conv", _each("GraniteSpeech GraniteSpeechPlus", "ConformerConvModule"), _halves("down_conv", *_GLU)),
    ("linear_start", "Gemma3nAudioConformerLightConv1d Gemma4AudioLightConv1d", _halves("linear_end", *_GLU)),
    ("ext_pw_conv_1d", "Phi4MultimodalAudioGluPointWiseConv", _equal(*_GLU)),
    ("residual_conv|self_attn_conv", _each("SeamlessM4T SeamlessM4Tv2", "ConformerAdapterLayer"), _equal(*_GLU)),
    ("residual_conv|self_attn_conv", "Wav2Vec2BertAdapterLayer", _equal(*_GLU)),
    ("conv", _each("Data2VecAudio Wav2Vec2 Wav2Vec2Conformer WavLM", "AdapterLayer"), _equal(*_GLU)),
    ("conv_layers", "Conv1dSubsampler", _equal(*_GLU)),
    ("in_layers", "VitsWaveNet", _equal(*_GLU)),
    ("res_skip_layers", "VitsWaveNet", _residual_skip),
    (r"weight_[ih]h(_l\d+(_reverse)?)?", "LSTM LSTMCell", _equal("input", "forget", "cell", "output")),
    (r"weight_[ih]h(_l\d+(_reverse)?)?", "GRU GRUCell", _equal("reset", "update", "new")),
    ("queries_keys_values", "LevitAttention", _levit),
    ("keys_values", "LevitAttentionSubsample", _levit),
    ("projection_in", "FocalNetModulation", _focal),
    ("qkv", _QKV, _THIRDS),
    ("qkv", "Exaone4_5_VisionAttention", _grouped_query),
    ("qkv", "timm.models.maxxvit.AttentionCl timm.models.maxxvit.Attention2d", _maxvit),
    ("qkv_linear", "LayoutLMv2SelfAttention", _THIRDS),
    ("in_proj_weight", "MultiheadAttention", _THIRDS),
    ("att_proj", "BarkSelfAttention BarkSelfFlashAttention2", _THIRDS),
    ("Wqkv", "ModernBertAttention MptAttention", _THIRDS),
    ("Wqkv", "DbrxAttention", _grouped_query),
    ("qkv_proj", "Phi3Attention Phi4MultimodalAttention", _grouped_query),
    ("qkv_proj", "MiniMaxLightningAttention", _by_head),
    ("qkv_proj", "CodeGenAttention", _codegen),
    ("qkv_proj", "MobileViTV2LinearSelfAttention", _parts(q="", k="embed_dim", v="embed_dim")),
    ("proj", "EsmFoldSelfAttention", _by_head),
    ("linear_kv", "EsmFoldInvariantPointAttention", partial(_by_head, names="kv")),
    ("c_attn", "GPTBigCodeAttention", _bigcode),
    ("c_attn", "Attention DecisionTransformerGPT2Attention GPT2Attention ImageGPTAttention", _split),
    ("query_key_value", _each("Bloom GPTNeoX GPTNeoXJapanese Persimmon", "Attention"), _by_head),
    ("query_key_value", "FalconAttention FalconFlashAttention2", _falcon),
    ("in_proj", "DisentangledSelfAttention", _by_head),
    ("to_kv", _each("GraniteSpeechConformer GraniteSpeechPlusConformer EvollaSequenceCompressor", "Attention"), _KV),
    ("kv_proj", "JetMoeAttention", _KV),
    ("q_proj", _each("Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4ExpText", "Attention"), _gated_query),
    ("q_gate_proj", "AXK2Attention", _gated_query),
    ("dense", _each("PPDocLayoutV2 PPDocLayoutV3", "GlobalPointer"), _equal("queries", "keys")),
    ("index_qk_proj", "Qwen4ExpTextQSAIndexer", _of_indexer),
    ("kv_a_proj_with_mqa", _LATENT, _parts(kv="kv_lora_rank", rope_k="qk_rope_head_dim")),
    ("kv_b_proj", _LATENT, _decompressed),
    ("in_proj_qkvz", "Qwen3NextGatedDeltaNet", _delta_net),
    ("in_proj_ba", "Qwen3NextGatedDeltaNet", _delta_net_gates),
    ("in_proj_qkv", _each("Qwen3_5 Qwen3_5Moe Qwen4ExpText", "GatedDeltaNet"), _delta_net_contiguous),
    ("in_proj", "Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv", _equal("B", "C", "x")),
    ("in_proj", "Lfm3VlVisionShortConv", _equal("input gate", "output gate", "x")),
    ("in_proj", "ZambaMambaMixer", _in_turns("x", "gate")),
    ("in_proj", _MAMBA, _equal("x", "gate")),
    ("x_proj|x_proj_weight", f"{_MAMBA} ZambaMambaMixer", _SSM_INPUTS),
    ("in_proj", _MAMBA2, _state_space),
    ("input_mix_weight_up", "Qwen4ExpTextGatedResidual", _streams),
    ("key_proj", "Qwen4ExpTextPLELayer", _streams),
    ("input_proj", "EsmFold2OuterProductMean", _SIDES),
    ("proj", "EsmFoldSequenceToPair", _SIDES),
    ("proj_bundle", "EsmFold2TriangleMultiplicativeUpdate", _equal("left", "right", "left gate", "right gate")),
    ("gate", "DFineGate Deimv2Gate", _equal("first", "second")),
    ("conv1", _CSP, _equal("first", "second")),
    ("pos_trans", "DeformableDetrModel", _equal("query", "target")),
    ("project", "VitsTextEncoder", _equal("mean", "log variance")),
    ("conv_proj", "VitsPosteriorEncoder", _equal("mean", "log variance")),
    ("linear", f"Qwen2_5_OmniAdaLayerNormZero_Final {_each(_ADA_2, start=_ADA)}", _modulations(2)),
    ("linear", f"VibeVoiceDiffusionHeadAdaLayerNorm {_ADA}AdaLayerNormZeroSingle", _modulations(3)),
    ("linear", f"{_ADA}LuminaRMSNormZero", _modulations(4)),
    ("linear", f"Qwen2_5_OmniAdaLayerNormZero {_each(_ADA_6, start=_ADA)}", _modulations(6)),
    ("linear", f"{_ADA}SD35AdaLayerNormZeroX", _modulations(9)),
    ("linear", f"{_ADA}CogView3PlusAdaLayerNormZeroTextImage", _modulations(12)),
    ("linear_1", "VibeVoiceDiffusionHeadFinalLayer", _modulations(2)),
    ("adaln_proj", _each("GradiumPhononTTS PocketTTS", "FlowFinalLayer"), _modulations(2)),
    ("adaln_proj", _each("GradiumPhononTTS PocketTTS", "FlowResBlock"), _modulations(3)),
    ("adaln_linear", "EsmFold2AtomLayer", _modulations(6)),
)


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
    words = {word for how in _rules_of(STORED, class_name, name) for word in how.split()}
    transposed = "transposed" in words or bool(class_name and getattr(owner, "is_transposed", False))
    # The module that uses a linear layer knows its layout; a parameter of its own name is used where it is.
    holder, word = (parent, leaf) if name == "weight" else (owner, name)
    rows = shape[-1 if transposed else -2]
    fused = _fused(word, holder, rows) if holder is not None and len(shape) < 4 else None
    below = number(owner, BELOW[class_name]) if class_name in BELOW else 0
    return WeightLayout(transposed, fused, below=below, stack="stack" in words, flat="flat" in words)


def heads_of(leaf: str, parent: nn.Module | None, rows: int) -> Fused | None:
    """Return the heads of a query, key or value projection that is not fused; None if heads are unknown."""
    # With compressed keys, `head_dim` is only a part of a query's head.
    sizes = ("qk_head_dim", *HEAD_SIZES) if leaf.startswith("q") else HEAD_SIZES
    head = number(parent, *sizes) if parent is not None and QUERY.fullmatch(leaf) else 0
    return Fused((Part("head", rows, head),)) if head and rows > head and rows % head == 0 else None


def _fused(word: str, module: nn.Module, size: int) -> Fused | None:
    for rule in _rules_of(RULES, read_as(module), word):
        fused = rule(module, size)
        # Sizes that do not add up are those of another class: one matrix is safer than wrong ones.
        if fused is not None and fused.size == size and all(part.size > 0 for part in fused.parts):
            return fused
    return None


def _rules_of(table: Sequence[tuple[str, str, _T]], class_name: str, name: str) -> Iterator[_T]:
    """Yield the entries of a table for a name in a class, as returned by `read_as`."""
    for names, classes, what in table if class_name else ():
        if (classes == "*" or class_name in classes.split()) and re.fullmatch(names, name):
            yield what
