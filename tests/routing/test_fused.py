"""The parts of fused projections are the named ones, as the output of the model shows.

Attention with zero values returns zero, whatever its queries and keys are; an MLP with a zero gate returns zero,
whatever its up projection is. So the tests set one part of every fused weight to zero: the others must then not change
the output. Parts that are cut at the wrong places fail at once.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_muon import route_parameters
from hf_muon.storage.views import parse

# The part of each fused weight whose zeros silence the other parts.
SILENT = {
    "q, k, v": "v",
    "q, v, k": "v",
    "q, k, v, z": "v",
    "k, v": "v",
    "kv, rope k": "kv",
    "gate, up": "gate",
    "x, gate": "gate",
    "gate, x, B, C, dt": "gate",
    "dt, B, C": "C",
    "B, C, x": "C",
}

LLAMA = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
GPT = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 40,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0}

MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT, {"q, k, v"}),
    "gpt2 cross": ("GPT2LMHeadModel", "GPT2Config", {**GPT, "add_cross_attention": True}, {"q, k, v", "k, v"}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT, {"q, k, v"}),
    "gpt_bigcode heads": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**GPT, "multi_query": False}, {"q, k, v"}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 4}, {"q, v, k"}),
    "imagegpt": ("ImageGPTForCausalImageModeling", "ImageGPTConfig", GPT, {"q, k, v"}),
    "openai": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT, {"q, k, v"}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LLAMA, {"q, k, v"}),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", LLAMA, {"q, k, v"}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**GPT, "hidden_size": 32}, {"q, k, v"}),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", {**LLAMA, "num_key_value_heads": 4}, {"q, k, v"}),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 40, "max_seq_len": 16},
        {"q, k, v"},
    ),
    "falcon 7b": ("FalconForCausalLM", "FalconConfig", {**LLAMA, "bos_token_id": 1}, {"q, k, v"}),
    "falcon 40b": (
        "FalconForCausalLM",
        "FalconConfig",
        {**LLAMA, "new_decoder_architecture": True, "num_kv_heads": 2},
        {"q, k, v"},
    ),
    "falcon rw": ("FalconForCausalLM", "FalconConfig", {**LLAMA, "multi_query": False, "alibi": True}, {"q, k, v"}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", LLAMA, {"q, k, v", "gate, up"}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**LLAMA, "head_dim": 8}, {"gate, up"}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**LLAMA, "head_dim": 8}, {"gate, up"}),
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": 40,
            "max_seq_len": 16,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 100},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
        {"q, k, v"},
    ),
    "bark": (
        "BarkSemanticModel",
        "BarkSemanticConfig",
        {"input_vocab_size": 40, "output_vocab_size": 40, "num_layers": 2, "num_heads": 4, "hidden_size": 32},
        {"q, k, v"},
    ),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**LLAMA, "cls_token_id": 1}, {"q, k, v", "gate, up"}),
    "deberta": ("DebertaForMaskedLM", "DebertaConfig", LLAMA, {"q, k, v"}),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**LLAMA, "num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention", "linear_attention"]},
        {"gate, up"},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**LLAMA, **MOE, "decoder_sparse_step": 1}, {"gate, up"}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**LLAMA, "num_local_experts": 4, "head_dim": 8}, {"gate, up"}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**LLAMA, "intermediate_size_mlp": 28, "num_local_experts": 4, "head_dim": 8, "interleave_moe_layer_step": 1},
        {"gate, up"},
    ),
    "jetmoe": ("JetMoeForCausalLM", "JetMoeConfig", {**LLAMA, "kv_channels": 8, "num_local_experts": 4}, {"k, v"}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**LLAMA, "num_local_experts": 4}, {"gate, up"}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **LLAMA,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 20,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 12,
            "q_lora_rank": 10,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 5,
        },
        {"k, v", "kv, rope k", "gate, up"},
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", MAMBA, {"x, gate", "dt, B, C"}),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", MAMBA, {"x, gate"}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        {"gate, x, B, C, dt"},
    ),
    "zamba": (
        "ZambaForCausalLM",
        "ZambaConfig",
        {
            **LLAMA,
            "mamba_d_state": 4,
            "n_mamba_heads": 2,
            "num_hidden_layers": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
        {"x, gate", "dt, B, C"},
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {**LLAMA, "layer_types": ["conv", "full_attention"]}, {"B, C, x"}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **LLAMA,
            **MOE,
            "shared_expert_intermediate_size": 20,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {"q, k, v, z", "gate, up"},
    ),
}


def build_model(name):
    model_class, config_class, options, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options)
    model = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def fused(model):
    """Yield each fused weight's name, the names of its parts, and the parts as views of the weight, by name."""
    for route in route_parameters(model):
        _, _, names = route.reason.partition(": ")
        if names:
            view = parse(route.view)
            weight = route.parameter.data.view(view.folded(route.shape))
            parts = [part.of(weight, weight.ndim + view.axis) for part in view.parts]
            yield route.name, names, dict(zip(names.split(", "), parts, strict=True))


@torch.no_grad()
def output(model, name):
    inputs = {"input_ids": torch.tensor([[5, 9, 33, 7, 12, 3, 8, 21], [17, 4, 4, 30, 11, 25, 6, 14]])}
    if "cross" in name:
        inputs["encoder_hidden_states"] = torch.linspace(-2, 2, 2 * 3 * 32).view(2, 3, 32)
    return model(**inputs, use_cache=False).logits if "bert" not in name else model(**inputs).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_zeros_silences_the_others(name):
    model = build_model(name)
    kinds = {names for _, names, _ in fused(model)}
    assert MODELS[name][3] <= kinds & SILENT.keys()
    for kind in sorted(kinds & SILENT.keys()):
        for silent in (False, True):
            model = build_model(name)
            weights_of_kind = [(n, parts) for n, names, parts in fused(model) if names == kind]
            for weight, parts in weights_of_kind:
                if silent:
                    parts[SILENT[kind]].zero_()
                    bias = dict(model.named_parameters()).get(weight.removesuffix("weight") + "bias")
                    if bias is None and weight.endswith("gate_up_proj"):
                        bias = dict(model.named_parameters()).get(weight + "_bias")
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
        model = build_model("qwen3_next")
        ((weight, _, parts),) = [entry for entry in fused(model) if entry[1] == "q, gate"]
        dict(model.named_parameters())[weight.replace("q_proj", "k_proj")].data.zero_()
        before = output(model, "")
        parts[part].copy_(torch.randn(parts[part].shape))
        assert torch.allclose(before, output(model, ""), rtol=0, atol=1e-5) == same


def test_the_rows_of_a_vision_tower():
    config = transformers.Qwen2VLConfig(
        text_config=LLAMA,
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 2},
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config).model.visual.eval()
    ((_, names, parts),) = list(fused(model))
    assert names == "q, k, v"
    patches, grid = torch.randn(16, 3 * 2 * 2 * 2), torch.tensor([[1, 4, 4]])
    parts["v"].zero_()
    results = []
    for _ in range(2):
        hidden = model(patches, grid_thw=grid)
        results.append(hidden if torch.is_tensor(hidden) else hidden.last_hidden_state)
        parts["q"].normal_()
        parts["k"].normal_()
    assert torch.allclose(*results, rtol=0, atol=1e-5)
