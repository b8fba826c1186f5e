"""Tables of transformers' architectures: the route of every parameter, and its view as matrices.

``tests/golden/routes`` has them; see tests/support/snapshots.py. Classes and configurations build the models on the
meta device, most of them with two layers.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

import torch
import transformers

from hf_muon import route_parameters

# A model for each line that is not indented: its name, its class, and options that differ from the defaults.
_MODELS = """
gpt2 GPT2LMHeadModel n_layer=2
gpt_neox GPTNeoXForCausalLM num_hidden_layers=2
gptj GPTJForCausalLM n_layer=2
codegen CodeGenForCausalLM n_layer=2
gpt_bigcode GPTBigCodeForCausalLM n_layer=2
llama LlamaForCausalLM num_hidden_layers=2
mistral MistralForCausalLM num_hidden_layers=2
mixtral MixtralForCausalLM num_hidden_layers=2
qwen2 Qwen2ForCausalLM num_hidden_layers=2
qwen2_moe Qwen2MoeForCausalLM num_hidden_layers=2
qwen3 Qwen3ForCausalLM num_hidden_layers=2
qwen3_moe Qwen3MoeForCausalLM hidden_size=2048 head_dim=128 num_attention_heads=32 num_key_value_heads=4
    num_hidden_layers=48 vocab_size=151936 moe_intermediate_size=768 num_experts=128 intermediate_size=6144
qwen3_next Qwen3NextForCausalLM num_hidden_layers=4
qwen3_5 Qwen3_5ForConditionalGeneration
qwen2_5_vl Qwen2_5_VLForConditionalGeneration text_config.num_hidden_layers=2 vision_config.depth=2
qwen3_vl Qwen3VLForConditionalGeneration text_config.num_hidden_layers=2 vision_config.depth=2
    vision_config.deepstack_visual_indexes=[0]
gemma2 Gemma2ForCausalLM num_hidden_layers=2
gemma3 Gemma3ForConditionalGeneration text_config.num_hidden_layers=2 vision_config.num_hidden_layers=2
phi PhiForCausalLM num_hidden_layers=2
phi3 Phi3ForCausalLM num_hidden_layers=2
falcon FalconForCausalLM num_hidden_layers=2
falcon_40b FalconForCausalLM num_hidden_layers=2 hidden_size=8192 num_attention_heads=128 num_kv_heads=8
    new_decoder_architecture=True
bloom BloomForCausalLM n_layer=2 hidden_size=1024 n_head=16
mpt MptForCausalLM n_layers=2
opt OPTForCausalLM num_hidden_layers=2
t5 T5ForConditionalGeneration num_layers=2 feed_forward_proj='gated-gelu'
bart BartForConditionalGeneration encoder_layers=2 decoder_layers=2
bert BertForSequenceClassification num_hidden_layers=2 num_labels=3
bert_mlm BertForMaskedLM num_hidden_layers=2
roberta RobertaForSequenceClassification num_hidden_layers=2 num_labels=3
deberta_v2 DebertaV2ForTokenClassification num_hidden_layers=2 num_labels=5
modernbert ModernBertForMaskedLM num_hidden_layers=2
deepseek_v2 DeepseekV2ForCausalLM num_hidden_layers=2 first_k_dense_replace=1
deepseek_v3 DeepseekV3ForCausalLM num_hidden_layers=2 first_k_dense_replace=1
glm4 Glm4ForCausalLM num_hidden_layers=2
glm4_moe Glm4MoeForCausalLM num_hidden_layers=2
gpt_oss GptOssForCausalLM num_hidden_layers=2
llama4 Llama4ForConditionalGeneration text_config.num_hidden_layers=2 text_config.interleave_moe_layer_step=2
    vision_config.num_hidden_layers=2
dbrx DbrxForCausalLM n_layers=2 d_model=6144 n_heads=48 attn_config.kv_n_heads=8 attn_config.rope_theta=500000.0
    ffn_config.ffn_hidden_size=10752 ffn_config.moe_num_experts=16 ffn_config.moe_top_k=4
olmo2 Olmo2ForCausalLM num_hidden_layers=2
olmoe OlmoeForCausalLM num_hidden_layers=2
mamba MambaForCausalLM num_hidden_layers=2
mamba2 Mamba2ForCausalLM num_hidden_layers=2
jamba JambaForCausalLM num_hidden_layers=8
bamba BambaForCausalLM num_hidden_layers=2 attn_layer_indices=[1]
zamba ZambaForCausalLM num_hidden_layers=8
recurrent_gemma RecurrentGemmaForCausalLM num_hidden_layers=3
zamba2 Zamba2ForCausalLM
granite GraniteForCausalLM num_hidden_layers=2
granitemoe GraniteMoeForCausalLM num_hidden_layers=2
granitemoehybrid GraniteMoeHybridForCausalLM num_hidden_layers=2 layer_types=['mamba','attention']
nemotron_h NemotronHForCausalLM
lfm2 Lfm2ForCausalLM num_hidden_layers=4
cohere2 Cohere2ForCausalLM num_hidden_layers=2
whisper WhisperForConditionalGeneration encoder_layers=2 decoder_layers=2
wav2vec2 Wav2Vec2ForCTC num_hidden_layers=2
siglip SiglipModel text_config.num_hidden_layers=2 vision_config.num_hidden_layers=2
clip CLIPModel text_config.num_hidden_layers=2 vision_config.num_hidden_layers=2
vit ViTForImageClassification num_hidden_layers=2 num_labels=10
convnext ConvNextForImageClassification depths=[1,1,2,1] num_labels=10
resnet ResNetForImageClassification depths=[1,1,2,1] num_labels=10
janus JanusForConditionalGeneration
llava LlavaForConditionalGeneration text_config.model_type='llama' text_config.num_hidden_layers=2
    vision_config.model_type='clip_vision_model' vision_config.num_hidden_layers=2
idefics3 Idefics3ForConditionalGeneration text_config.model_type='llama' text_config.num_hidden_layers=2
    text_config.vocab_size=128259 text_config.pad_token_id=128002
internvl InternVLForConditionalGeneration vision_config.num_hidden_layers=2
dinov2 Dinov2ForImageClassification num_hidden_layers=2 num_labels=10
smollm3 SmolLM3ForCausalLM num_hidden_layers=2
ernie4_5_moe Ernie4_5_MoeForCausalLM num_hidden_layers=3
minimax MiniMaxForCausalLM num_hidden_layers=2
# Heads of detectors.
yolos YolosForObjectDetection num_hidden_layers=2 num_labels=91
rt_detr RTDetrForObjectDetection decoder_layers=2 num_labels=80
sam SamModel vision_config.num_hidden_layers=2 mask_decoder_config.num_hidden_layers=2
# A projection with "embed" in its name.
electra ElectraForPreTraining num_hidden_layers=2
# Mixtures of experts, latent attention, indexers and linear attention of 2025 and 2026.
qwen3_5_moe Qwen3_5MoeForConditionalGeneration
gemma4 Gemma4ForConditionalGeneration
mistral4 Mistral4ForCausalLM num_hidden_layers=2
deepseek_v4 DeepseekV4ForCausalLM num_hidden_layers=4
glm_moe_dsa GlmMoeDsaForCausalLM num_hidden_layers=4
glm5_next Glm5NextForConditionalGeneration text_config.num_hidden_layers=4 vision_config.depth=2
kimi_linear KimiLinearForCausalLM num_hidden_layers=2 layer_types=['linear_attention','full_attention']
kimi_k25 Kimi_K25ForConditionalGeneration text_config.num_hidden_layers=4 vision_config.num_hidden_layers=2
minimax_m2 MiniMaxM2ForCausalLM num_hidden_layers=2
longcat_flash LongcatFlashForCausalLM num_layers=2
lfm3 Lfm3ForCausalLM num_hidden_layers=4
hy_v4 HYV4ForCausalLM num_hidden_layers=4
olmo_hybrid OlmoHybridForCausalLM num_hidden_layers=4
bailing_hybrid BailingHybridForCausalLM num_hidden_layers=3
    layer_types=['linear_attention','linear_attention','full_attention']
"""


def _read(text: str) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Return the classes of each model and of its configuration, and the options."""
    models = {}
    for line in re.sub(r"#.*", "", text).strip().replace("\n    ", " ").splitlines():
        name, model_class, *words = line.split() or ["", ""]
        config_class = re.sub(r"(For\w+|LMHeadModel|Model)$", "", model_class) + "Config"
        options: dict[str, Any] = {}
        for word in words:
            path, _, value = word.partition("=")
            *sections, key = path.split(".")
            section = options
            for part in sections:
                section = section.setdefault(part, {})
            section[key] = ast.literal_eval(value)
        models |= {name: (model_class, config_class, options)} if name else {}
    return models


ZOO = _read(_MODELS)


def build(name: str) -> torch.nn.Module | None:
    """Return a model without weights, or None if this transformers does not have it."""
    model_class, config_class, options = ZOO[name]
    if not hasattr(transformers, model_class):
        return None
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, model_class)(config)
    return model


def table(name: str, model: torch.nn.Module | None) -> str:
    """Return the table of an architecture: parameters folded over layers, with their shapes, reasons and views."""
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
