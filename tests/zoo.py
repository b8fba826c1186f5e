"""Tables of transformers' architectures: the route of every parameter, and its view as matrices.

``tests/golden/routes`` has them; see tests/snapshots.py. Classes and configurations build the models on the meta
device, most of them with two layers.
"""

from __future__ import annotations

import math
import re

import torch
import transformers

from hf_muon import route_parameters

# Model class, configuration class, and options that differ from its defaults.
ZOO: dict[str, tuple[str, str, dict[str, object]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"num_hidden_layers": 2}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {"n_layer": 2}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {"n_layer": 2}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {"n_layer": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 2}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"num_hidden_layers": 2}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_hidden_layers": 2}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"num_hidden_layers": 2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_hidden_layers": 2}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "head_dim": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_hidden_layers": 48,
            "vocab_size": 151936,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "intermediate_size": 6144,
        },
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {"num_hidden_layers": 4}),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", {}),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 2}},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 2, "deepstack_visual_indexes": [0]}},
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"num_hidden_layers": 2}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {"num_hidden_layers": 2}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"num_hidden_layers": 2}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {"num_hidden_layers": 2}),
    "falcon_40b": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            "num_hidden_layers": 2,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "hidden_size": 1024, "n_head": 16}),
    "mpt": ("MptForCausalLM", "MptConfig", {"n_layers": 2}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"num_hidden_layers": 2}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"num_layers": 2, "feed_forward_proj": "gated-gelu"}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {"encoder_layers": 2, "decoder_layers": 2}),
    "fsmt": ("FSMTForConditionalGeneration", "FSMTConfig", {"encoder_layers": 2, "decoder_layers": 2}),
    "bert": ("BertForSequenceClassification", "BertConfig", {"num_hidden_layers": 2, "num_labels": 3}),
    "bert_mlm": ("BertForMaskedLM", "BertConfig", {"num_hidden_layers": 2}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {"num_hidden_layers": 2, "num_labels": 3}),
    "deberta_v2": ("DebertaV2ForTokenClassification", "DebertaV2Config", {"num_hidden_layers": 2, "num_labels": 5}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {"num_hidden_layers": 2}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {"num_hidden_layers": 2, "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {"num_hidden_layers": 2, "first_k_dense_replace": 1}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {"num_hidden_layers": 2}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {"num_hidden_layers": 2}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"num_hidden_layers": 2}),
    "llama4": (
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "text_config": {"num_hidden_layers": 2, "interleave_moe_layer_step": 2},
            "vision_config": {"num_hidden_layers": 2},
        },
    ),
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "n_layers": 2,
            "d_model": 6144,
            "n_heads": 48,
            "attn_config": {"kv_n_heads": 8, "rope_theta": 500000.0},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {"num_hidden_layers": 2}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_hidden_layers": 2}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"num_hidden_layers": 2}),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", {"num_hidden_layers": 2}),
    "jamba": ("JambaForCausalLM", "JambaConfig", {"num_hidden_layers": 8}),
    "bamba": ("BambaForCausalLM", "BambaConfig", {"num_hidden_layers": 2, "attn_layer_indices": [1]}),
    "zamba": ("ZambaForCausalLM", "ZambaConfig", {"num_hidden_layers": 8}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", {"num_hidden_layers": 3}),
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig", {"n_layer": 2}),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", {}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {"num_hidden_layers": 2}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {"num_hidden_layers": 2}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    ),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", {}),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"num_hidden_layers": 4}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {"num_hidden_layers": 2}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {"encoder_layers": 2, "decoder_layers": 2}),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", {"num_hidden_layers": 2}),
    "siglip": (
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {"num_hidden_layers": 2, "num_labels": 10}),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", {"depths": [1, 1, 2, 1], "num_labels": 10}),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {"depths": [1, 1, 2, 1], "num_labels": 10}),
    "hgnet_v2": ("HGNetV2ForImageClassification", "HGNetV2Config", {"num_labels": 10}),
    "perceiver_cls": (
        "PerceiverForSequenceClassification",
        "PerceiverConfig",
        {"num_self_attends_per_block": 2, "num_labels": 4},
    ),
    "perceiver": ("PerceiverForMaskedLM", "PerceiverConfig", {"num_self_attends_per_block": 2}),
    "janus": ("JanusForConditionalGeneration", "JanusConfig", {}),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", "num_hidden_layers": 2},
            "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 2},
        },
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {"text_config": {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 128259, "pad_token_id": 128002}},
    ),
    "internvl": ("InternVLForConditionalGeneration", "InternVLConfig", {"vision_config": {"num_hidden_layers": 2}}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {"num_hidden_layers": 2, "num_labels": 10}),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", {"num_hidden_layers": 2}),
    "bark": ("BarkSemanticModel", "BarkSemanticConfig", {"num_layers": 2}),
    "musicgen": ("MusicgenForCausalLM", "MusicgenDecoderConfig", {"num_hidden_layers": 2}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"num_hidden_layers": 2}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", {"num_hidden_layers": 3}),
    "minimax": ("MiniMaxForCausalLM", "MiniMaxConfig", {"num_hidden_layers": 2}),
    # Heads of detectors, and other outputs.
    "yolos": ("YolosForObjectDetection", "YolosConfig", {"num_hidden_layers": 2, "num_labels": 91}),
    "rt_detr": ("RTDetrForObjectDetection", "RTDetrConfig", {"decoder_layers": 2, "num_labels": 80}),
    "d_fine": ("DFineForObjectDetection", "DFineConfig", {"decoder_layers": 2, "num_labels": 80}),
    "sam": (
        "SamModel",
        "SamConfig",
        {"vision_config": {"num_hidden_layers": 2}, "mask_decoder_config": {"num_hidden_layers": 2}},
    ),
    "decision_transformer": ("DecisionTransformerModel", "DecisionTransformerConfig", {"n_layer": 2}),
    "fastspeech2_conformer": (
        "FastSpeech2ConformerModel",
        "FastSpeech2ConformerConfig",
        {"encoder_layers": 1, "decoder_layers": 1},
    ),
    # Weight norms, and projections with "embed" in their name.
    "vits": ("VitsModel", "VitsConfig", {"num_hidden_layers": 2}),
    "encodec": ("EncodecModel", "EncodecConfig", {}),
    "funnel": ("FunnelForSequenceClassification", "FunnelConfig", {"block_sizes": [1, 1], "num_decoder_layers": 1}),
    "mobilebert": ("MobileBertForMaskedLM", "MobileBertConfig", {"num_hidden_layers": 2}),
    "electra": ("ElectraForPreTraining", "ElectraConfig", {"num_hidden_layers": 2}),
    "mask2former": ("Mask2FormerModel", "Mask2FormerConfig", {"decoder_layers": 2, "encoder_layers": 2}),
    "csm": (
        "CsmForConditionalGeneration",
        "CsmConfig",
        {"num_hidden_layers": 2, "depth_decoder_config": {"num_hidden_layers": 2}},
    ),
    "blt": (
        "BltForCausalLM",
        "BltConfig",
        {
            part: {"num_hidden_layers": 2}
            for part in ("patcher_config", "encoder_config", "decoder_config", "global_config")
        },
    ),
    "vjepa2": ("VJEPA2Model", "VJEPA2Config", {"num_hidden_layers": 2, "pred_num_hidden_layers": 2}),
    "fuyu": ("FuyuForCausalLM", "FuyuConfig", {"num_hidden_layers": 2}),
    # Gates, fused with the values that they scale.
    "moonshine": (
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2},
    ),
    "kyutai_speech_to_text": (
        "KyutaiSpeechToTextForConditionalGeneration",
        "KyutaiSpeechToTextConfig",
        {"num_hidden_layers": 2},
    ),
    "levit": ("LevitForImageClassification", "LevitConfig", {"depths": [1, 1, 1], "num_labels": 10}),
    "focalnet": ("FocalNetForImageClassification", "FocalNetConfig", {"depths": [1, 1, 1, 1], "num_labels": 10}),
    "wav2vec2_conformer": ("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", {"num_hidden_layers": 2}),
    "slanet": ("SLANetForTableRecognition", "SLANetConfig", {}),
    # Mixtures of experts, latent attention, indexers and linear attention of 2025 and 2026.
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", {}),
    "gemma4": ("Gemma4ForConditionalGeneration", "Gemma4Config", {}),
    "mistral4": ("Mistral4ForCausalLM", "Mistral4Config", {"num_hidden_layers": 2}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", {"num_hidden_layers": 4}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {"num_hidden_layers": 4}),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        {"text_config": {"num_hidden_layers": 4}, "vision_config": {"depth": 2}},
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration",
        "Kimi_K25Config",
        {"text_config": {"num_hidden_layers": 4}, "vision_config": {"num_hidden_layers": 2}},
    ),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {"num_hidden_layers": 2}),
    "longcat_flash": ("LongcatFlashForCausalLM", "LongcatFlashConfig", {"num_layers": 2}),
    "lfm3": ("Lfm3ForCausalLM", "Lfm3Config", {"num_hidden_layers": 4}),
    "hy_v4": ("HYV4ForCausalLM", "HYV4Config", {"num_hidden_layers": 4}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {"num_hidden_layers": 4}),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
}


def build(name: str) -> torch.nn.Module | None:
    """Return a model without weights, or None if this transformers does not have it."""
    model_class, config_class, options = ZOO[name]
    if not hasattr(transformers, model_class):
        return None
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, model_class)(config)
    return model


def table(name: str) -> str:
    """Return the table of an architecture: parameters folded over layers, with their shapes, reasons and views."""
    model = build(name)
    if model is None:
        return "not in this version of transformers\n"
    routes = route_parameters(model)
    total = sum(math.prod(route.shape) for route in routes)
    lines = [f"{ZOO[name][0]}({', '.join(f'{k}={v}' for k, v in ZOO[name][2].items())})"]
    for heading, use_muon in (("muon", True), ("adamw", False)):
        rows: dict[tuple[str, ...], int] = {}
        for route in routes:
            if route.use_muon == use_muon:
                folded = re.sub(r"(?<=\.)\d+(?=\.)", "*", route.name)
                view = f"  [{route.view}]" if route.view else ""
                key = (folded, "x".join(map(str, route.shape)) or "scalar", f"{route.reason}{view}")
                rows[key] = rows.get(key, 0) + 1
        weights = sum(math.prod(route.shape) for route in routes if route.use_muon == use_muon)
        lines += ["", f"{heading}: {weights:,} weights, {weights / total:.1%}"]
        lines += [f"  {folded}  {shape}  {count} x {reason}" for (folded, shape, reason), count in rows.items()]
    return "\n".join(lines) + "\n"
