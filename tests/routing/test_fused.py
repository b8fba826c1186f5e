"""The parts of fused weights are the named ones, as the output of the model shows.

Attention with zero values returns zero, whatever its queries and keys are; an MLP with a zero gate returns zero,
whatever its up projection is. So the tests set one part of every fused weight to zero: the others must then not change
the output, and without the zeros they must. Parts that are cut at the wrong places fail at once.
"""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import sigmoid, tanh

from hf_muon import route_parameters
from hf_muon.storage.boxes import shards_of
from hf_muon.storage.regions import whole
from hf_muon.storage.views import parse

# The part of each fused weight whose zeros silence the other parts.
SILENT = {
    **dict.fromkeys(("q, k, v", "q, v, k", "q, k, v, z", "k, v"), "v"),
    **dict.fromkeys(("gate, up", "x, gate", "gate, x, B, C, dt"), "gate"),
    "kv, rope k": "kv",
    **dict.fromkeys(("dt, B, C", "B, C, x"), "C"),
}
# Elsewhere than in text models. A sigmoid gate of zeros passes half of the value, so there it is the value.
SILENT_IN_MODULES = {
    **dict.fromkeys(("q, k, v", "k, v"), "v"),
    **dict.fromkeys(("gate, up", "up, gate"), "gate"),
    "value, gate": "value",
    "q, context, gates": "q",
}


def fused(model):
    """Yield each fused weight's name, the names of its parts, and the parts as views of the weight, by name."""
    for route in route_parameters(model):
        _, _, names = route.reason.partition(": ")
        if names:
            view = parse(route.view)
            parts = shards_of(view, route.shape, (whole(route.shape),))
            count = math.prod(view.folded(route.shape)[:-2])
            boxes = [own.boxes(0, count)[0] for part in parts for own in part.held]
            parts = [box.of(route.parameter.data) for box in boxes]
            yield route.name, names, dict(zip(names.split(", "), parts, strict=True))


# --- text models

LLAMA = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 40, "n_positions": 16} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0}
MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 40, "max_seq_len": 16}
DBRX = MPT | {
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 100},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}
BARK = {"input_vocab_size": 40, "output_vocab_size": 40, "num_layers": 2, "num_heads": 4, "hidden_size": 32}
LATENT = (
    {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
    | {"moe_intermediate_size": 20, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4}
)
ZAMBA = {"mamba_d_state": 4, "n_mamba_heads": 2, "num_hidden_layers": 6, "use_mamba_kernels": False} | {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
GATED_DELTA = {"shared_expert_intermediate_size": 20, "layer_types": ["linear_attention", "full_attention"]} | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
}
LIGHTNING = {"head_dim": 8, "layer_types": ["full_attention", "linear_attention"]}
QKV, GATED = "q, k, v", "gate, up"
EXPERTS = {"num_local_experts": 4}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2}
FALCON_RW = {"multi_query": False, "alibi": True}


class Small(NamedTuple):
    """A model: its kind, "ForCausalLM" unless the kind says another class; its options; the fused weights it has."""

    kind: str
    options: dict[str, object]
    has: set[str]

    def build(self):
        name, _, rest = self.kind.partition(" ")
        torch.manual_seed(0)
        text = "Text" if name == "Llama4" else ""
        config = getattr(transformers, f"{name}{text}Config")(**self.options)
        model = getattr(transformers, f"{name}{rest or 'ForCausalLM'}")(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        return model


MODELS = {
    "gpt2": Small("GPT2 LMHeadModel", GPT, {QKV}),
    "gpt2 cross": Small("GPT2 LMHeadModel", GPT | {"add_cross_attention": True}, {QKV, "k, v"}),
    "gpt_bigcode": Small("GPTBigCode", GPT, {QKV}),
    "gpt_bigcode heads": Small("GPTBigCode", GPT | {"multi_query": False}, {QKV}),
    "codegen": Small("CodeGen", GPT | {"rotary_dim": 4}, {"q, v, k"}),
    "imagegpt": Small("ImageGPT ForCausalImageModeling", GPT, {QKV}),
    "openai": Small("OpenAIGPT LMHeadModel", GPT, {QKV}),
    "gpt_neox": Small("GPTNeoX", LLAMA, {QKV}),
    "gpt_neox_japanese": Small("GPTNeoXJapanese", LLAMA, {QKV}),
    "bloom": Small("Bloom", GPT | {"hidden_size": 32}, {QKV}),
    "persimmon": Small("Persimmon", LLAMA | {"num_key_value_heads": 4}, {QKV}),
    "mpt": Small("Mpt", MPT, {QKV}),
    "falcon 7b": Small("Falcon", LLAMA, {QKV}),
    "falcon 40b": Small("Falcon", LLAMA | FALCON_40B, {QKV}),
    "falcon rw": Small("Falcon", LLAMA | FALCON_RW, {QKV}),
    "phi3": Small("Phi3", LLAMA, {QKV, GATED}),
    "glm4": Small("Glm4", LLAMA | {"head_dim": 8}, {GATED}),
    "glm": Small("Glm", LLAMA | {"head_dim": 8}, {GATED}),
    "dbrx": Small("Dbrx", DBRX, {QKV}),
    "bark": Small("BarkSemantic Model", BARK, {QKV}),
    "modernbert": Small("ModernBert ForMaskedLM", LLAMA | {"cls_token_id": 1}, {QKV, GATED}),
    "deberta": Small("Deberta ForMaskedLM", LLAMA, {QKV}),
    "minimax": Small("MiniMax", LLAMA | EXPERTS | LIGHTNING, {GATED}),
    "qwen3_moe": Small("Qwen3Moe", LLAMA | MOE | {"decoder_sparse_step": 1}, {GATED}),
    "gpt_oss": Small("GptOss", LLAMA | EXPERTS | {"head_dim": 8}, {GATED}),
    "llama4": Small(
        "Llama4",
        LLAMA | EXPERTS | {"intermediate_size_mlp": 28, "head_dim": 8, "interleave_moe_layer_step": 1},
        {GATED},
    ),
    "jetmoe": Small("JetMoe", LLAMA | EXPERTS | {"kv_channels": 8}, {"k, v"}),
    "granitemoe": Small("GraniteMoe", LLAMA | EXPERTS, {GATED}),
    "deepseek_v3": Small("DeepseekV3", LLAMA | LATENT, {"k, v", "kv, rope k", GATED}),
    "mamba": Small("Mamba", MAMBA, {"x, gate", "dt, B, C"}),
    "falcon_mamba": Small("FalconMamba", MAMBA, {"x, gate"}),
    "mamba2": Small(
        "Mamba2", MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, {"gate, x, B, C, dt"}
    ),
    "zamba": Small("Zamba", LLAMA | ZAMBA, {"x, gate", "dt, B, C"}),
    "lfm2": Small("Lfm2", LLAMA | {"layer_types": ["conv", "full_attention"]}, {"B, C, x"}),
    "qwen3_next": Small("Qwen3Next", LLAMA | MOE | GATED_DELTA, {"q, k, v, z", GATED}),
}


@torch.no_grad()
def output(model, name=""):
    inputs = {"input_ids": torch.tensor([[5, 9, 33, 7, 12, 3, 8, 21], [17, 4, 4, 30, 11, 25, 6, 14]])}
    if "cross" in name:
        inputs["encoder_hidden_states"] = torch.linspace(-2, 2, 2 * 3 * 32).view(2, 3, 32)
    return model(**inputs, use_cache=False).logits if "bert" not in name else model(**inputs).logits


@pytest.mark.promise("routes")
@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_zeros_silences_the_others(name):
    small = MODELS[name]
    kinds = {names for _, names, _ in fused(small.build())} & SILENT.keys()
    assert small.has <= kinds
    for kind in sorted(kinds):
        for silent in (False, True):
            model = small.build()
            own = dict(model.named_parameters())
            weights_of_kind = [(weight, parts) for weight, names, parts in fused(model) if names == kind]
            for weight, parts in weights_of_kind if silent else ():
                parts[SILENT[kind]].zero_()
                bias = own.get(weight.removesuffix("weight") + "bias")
                if bias is None and weight.endswith("gate_up_proj"):
                    bias = own.get(weight + "_bias")
                if bias is not None:
                    bias.data.zero_()
            before = output(model, name)
            generator = torch.Generator().manual_seed(1)
            for _, parts in weights_of_kind:
                for part, weights in parts.items():
                    if part != SILENT[kind]:
                        weights.copy_(torch.randn(weights.shape, generator=generator))
            assert before.isfinite().all()
            assert torch.allclose(before, output(model, name), rtol=0, atol=1e-5) == silent, (kind, silent)


def test_a_gated_query_takes_turns_with_its_gate():
    """Set the keys to zero: queries then do not change the output, and gates do."""
    for part, same in (("q", True), ("gate", False)):
        model = MODELS["qwen3_next"].build()
        ((weight, _, parts),) = [entry for entry in fused(model) if entry[1] == "q, gate"]
        dict(model.named_parameters())[weight.replace("q_proj", "k_proj")].data.zero_()
        before = output(model)
        parts[part].copy_(torch.randn(parts[part].shape))
        assert torch.allclose(before, output(model), rtol=0, atol=1e-5) == same


# --- modules outside text models

HIDDEN, TOKENS = {"hidden_size": 16}, (2, 6, 16)
CONFORMER = (
    HIDDEN
    | {"num_attention_heads": 2, "conv_depthwise_kernel_size": 3, "hidden_act": "silu"}
    | {"conformer_conv_dropout": 0.0}
)
SEAMLESS = (
    HIDDEN
    | {"speech_encoder_attention_heads": 2, "speech_encoder_intermediate_size": 16}
    | {"adaptor_kernel_size": 2, "adaptor_stride": 2, "adaptor_dropout": 0.0}
)
LEVIT = {"key_dim": 4, "num_attention_heads": 2, "attention_ratio": 3}
SUBSAMPLE = LEVIT | {"input_dim": 16, "output_dim": 20, "stride": 2, "resolution_in": 3, "resolution_out": 2}
SPEECH = {"input_feat_per_channel": 16, "conv_channels": 20, "d_model": 8}
AYA = {"alignment_intermediate_size": 24, "downsample_factor": 2} | {
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 4},
    "text_config": {"model_type": "cohere2", "hidden_size": 16},
}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 2}


class Part(NamedTuple):
    """A module of transformers: where it is, its config's class and options, other arguments, shapes of inputs."""

    code: str
    name: str
    config: str = ""
    options: dict[str, object] = {}
    arguments: dict[str, object] = {}
    shapes: tuple[tuple[int, ...], ...] = (TOKENS,)

    def build(self):
        package, _, file = self.code.rpartition(".")
        code = importlib.import_module(f"transformers.models.{package or file}.modeling_{file}")
        package = importlib.import_module(f"transformers.models.{package or file}")
        config = [getattr(package, f"{self.config}Config")(**self.options)] if self.config else []
        torch.manual_seed(0)
        model = getattr(code, self.name)(*config, **self.arguments)
        model.eval()  # Levit's returns None
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return model, [torch.randn(shape) for shape in self.shapes]


MODULES = [
    Part("moonshine", "MoonshineDecoderMLP", "Moonshine", HIDDEN, {"hidden_act": "silu"}),
    Part("kyutai_speech_to_text", "KyutaiSpeechToTextGatingMLP", "KyutaiSpeechToText", HIDDEN | {"ffn_dim": 24}),
    Part("clvp", "ClvpEncoderMLP", "ClvpEncoder", HIDDEN | {"intermediate_size": 24}),
    Part("wav2vec2_conformer", "Wav2Vec2ConformerConvolutionModule", "Wav2Vec2Conformer", CONFORMER),
    Part("wav2vec2_bert", "Wav2Vec2BertConvolutionModule", "Wav2Vec2Bert", CONFORMER),
    Part("seamless_m4t", "SeamlessM4TConformerAdapterLayer", "SeamlessM4T", SEAMLESS),
    Part("gemma3n", "Gemma3nAudioConformerLightConv1d", "Gemma3nAudio", HIDDEN | {"conf_conv_kernel_size": 3}),
    Part(
        "granite_speech",
        "GraniteSpeechConformerConvModule",
        "GraniteSpeechEncoder",
        {"hidden_dim": 16, "conv_kernel_size": 3},
    ),
    Part(
        "phi4_multimodal",
        "Phi4MultimodalAudioGluPointWiseConv",
        "Phi4MultimodalAudio",
        HIDDEN | {"ext_pw_out_channel": 12},
    ),
    Part("speech_to_text", "Conv1dSubsampler", "Speech2Text", SPEECH, shapes=((2, 9, 16),)),
    Part("levit", "LevitAttention", arguments=LEVIT | {"hidden_sizes": 16, "resolution": 2}, shapes=((2, 4, 16),)),
    Part("levit", "LevitAttentionSubsample", arguments=SUBSAMPLE, shapes=((2, 9, 16),)),
    Part(
        "focalnet",
        "FocalNetModulation",
        "FocalNet",
        {"normalize_modulator": False},
        {"index": 0, "dim": 16},
        ((2, 4, 4, 16),),
    ),
    Part("vits", "VitsWaveNet", "Vits", HIDDEN, {"num_layers": 1}, ((2, 16, 6), (1,))),
    Part("aya_vision", "AyaVisionMultiModalProjector", "AyaVision", AYA, shapes=((1, 4, 4),)),
    Part("clvp", "ClvpGatedLinearUnit", "ClvpEncoder", HIDDEN | {"intermediate_size": 24}),
    Part("wav2vec2", "Wav2Vec2AdapterLayer", "Wav2Vec2", {"output_hidden_size": 16}, shapes=((2, 16, 6),)),
    Part("mobilevitv2", "MobileViTV2LinearSelfAttention", "MobileViTV2", {}, {"embed_dim": 16}, ((2, 16, 3, 5),)),
    Part("esm.esmfold", "EsmFoldSelfAttention", "", {}, {"embed_dim": 16, "num_heads": 2, "head_width": 8}),
]


def first(results):
    return results[0] if isinstance(results, tuple) else results


@torch.no_grad()
@pytest.mark.parametrize("part", MODULES, ids=lambda part: part.name)
def test_a_part_of_zeros_silences_the_others_in_modules(part):
    kinds = {names for _, names, _ in fused(part.build()[0])}
    assert kinds
    assert kinds <= SILENT_IN_MODULES.keys()
    for silent in (False, True):
        model, inputs = part.build()
        weights = list(fused(model))
        for name, names, parts in weights if silent else ():
            rows = parts[SILENT_IN_MODULES[names]]
            if "parametrizations" in name:  # under a weight norm, zero the magnitudes: a direction cannot be zero
                rows = model.get_parameter(name.replace("original1", "original0"))[: len(rows)]
            rows.zero_()
            owner, _, leaf = name.replace(".parametrizations.weight.original1", ".weight").rpartition(".")
            assert leaf == "weight"
            bias = getattr(model.get_submodule(owner), "bias", None)
            if bias is not None:
                bias.zero_()
        if silent and hasattr(model, "b1"):
            model.b1.zero_()
        for module in model.modules():
            if silent and isinstance(module, nn.BatchNorm1d) and "Levit" in part.name:
                module.bias.zero_()
        before = first(model(*inputs))
        for _, names, parts in weights:
            for name, values in parts.items():
                if name != SILENT_IN_MODULES[names]:
                    values.normal_()
        assert torch.allclose(before, first(model(*inputs)), rtol=0, atol=1e-5) == silent


@torch.no_grad()
@pytest.mark.parametrize(("name", "count"), [("", 6), ("_Final", 2)])
def test_the_modulations_of_an_adaptive_norm(name, count):
    """Expect the chunks into which Qwen2.5-Omni cuts what its norms compute from the time."""
    code = importlib.import_module("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": getattr(code, f"Qwen2_5_OmniAdaLayerNormZero{name}")(16)})
    ((_, _, parts),) = list(fused(model))
    assert len(parts) == count
    chunks = model.norm.linear.weight.chunk(count)
    assert all(torch.equal(part, chunk) for part, chunk in zip(parts.values(), chunks, strict=True))


@torch.no_grad()
def test_the_rows_of_a_vision_tower():
    config = transformers.Qwen2VLConfig(text_config=LLAMA, vision_config=VISION)
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config).model.visual.eval()
    ((_, names, parts),) = list(fused(model))
    assert names == QKV
    patches, grid = torch.randn(16, 3 * 2 * 2 * 2), torch.tensor([[1, 4, 4]])
    parts["v"].zero_()
    results = []
    for _ in range(2):
        hidden = model(patches, grid_thw=grid)
        results.append(hidden if torch.is_tensor(hidden) else hidden.last_hidden_state)
        parts["q"].normal_()
        parts["k"].normal_()
    assert torch.allclose(*results, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_gates_of_an_lstm():
    torch.manual_seed(0)
    model = nn.LSTM(5, 4)
    (x, h, c), parts = (torch.randn(1, n) for n in (5, 4, 4)), {}
    for name, names, weights in fused(model):
        assert names == "input, forget, cell, output"
        bias = getattr(model, name.replace("weight", "bias")).split(4)
        read = x if "_ih_" in name else h
        for (part, weight), b in zip(weights.items(), bias, strict=True):
            parts[part] = parts.get(part, 0) + read @ weight.T + b
    after = sigmoid(parts["forget"]) * c + sigmoid(parts["input"]) * tanh(parts["cell"])
    found, _ = model(x[None], (h[None], c[None]))
    assert torch.allclose(found[0], sigmoid(parts["output"]) * tanh(after), atol=1e-6)


@torch.no_grad()
def test_the_gates_of_a_gru():
    torch.manual_seed(0)
    model = nn.GRUCell(5, 4)
    x, h = torch.randn(1, 5), torch.randn(1, 4)
    sums = {}
    for name, names, weights in fused(model):
        assert names == "reset, update, new"
        bias = getattr(model, name.replace("weight", "bias")).split(4)
        for (part, weight), b in zip(weights.items(), bias, strict=True):
            sums[name[-2:], part] = (x if name.endswith("ih") else h) @ weight.T + b
    reset, update = (sigmoid(sums["ih", part] + sums["hh", part]) for part in ("reset", "update"))
    new = tanh(sums["ih", "new"] + reset * sums["hh", "new"])
    assert torch.allclose(model(x, h), (1 - update) * new + update * h, atol=1e-6)


def test_layouts_of_one_matrix_with_more_dims():
    """Check Funnel's position kernel, (in, heads x size), and Moshi's linear layer, one matrix for each codebook."""
    funnel = importlib.import_module("transformers.models.funnel.modeling_funnel")
    code = importlib.import_module("transformers.models.kyutai_speech_to_text.modeling_kyutai_speech_to_text")
    config = SimpleNamespace(**funnel.FunnelConfig(d_model=16, n_head=2, d_head=6).to_dict())
    with torch.device("meta"):
        attention, stack = (
            funnel.FunnelRelMultiheadAttention(config, 0),
            code.KyutaiSpeechToTextFlexibleLinear(8, 12, 3),
        )
    views = {route.name: (route.use_muon, route.view) for route in route_parameters(attention)}
    assert views["r_kernel"] == (True, "transposed, flat")
    assert {(route.use_muon, route.view) for route in route_parameters(nn.ModuleDict({"fc": stack}))} == {(True, "")}
