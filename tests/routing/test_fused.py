"""The parts of fused weights are the named ones, as the output of the model shows.

Attention with zero values returns zero, whatever its queries and keys are; an MLP with a zero gate returns zero,
whatever its up projection is. So the tests set one part of every fused weight to zero: the others must then not change
the output, and without the zeros they must. Parts that are cut at the wrong places fail at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import transformers

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


VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 2}


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
