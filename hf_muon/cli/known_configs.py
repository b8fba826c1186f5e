"""Published configurations of models, as much as their shapes need, so that a plan needs no download.

Numbers are those of each model's `config.json` at https://huggingface.co/.
"""

from __future__ import annotations

from typing import Any

Card = dict[str, Any]


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool) -> Card:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(layers: int, hidden: int, intermediate: int, heads: int) -> Card:
    return {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }


def _llama(layers: int, hidden: int, intermediate: int, heads: int) -> Card:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }


def _deepseek_v3(experts: int, heads: int, dense_layers: int, vocabulary: int, groups: int) -> Card:
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": dense_layers,
        "n_group": groups,
        "topk_group": max(1, groups // 2),
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


CARDS: dict[str, Card] = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 768, 32),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 1536, 64),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64),
    "deepseek-v3": _deepseek_v3(256, 128, 3, 129280, 8),
    "kimi-k2": _deepseek_v3(384, 64, 1, 163840, 1),
}
"""By names in lower case. Kimi K2, one trillion weights, has the architecture of DeepSeek-V3."""
