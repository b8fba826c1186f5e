"""The models of the studies: small ones of transformers' own classes, with random weights that the seed decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD_DIM = 32
VOCAB_SIZE = 2048
Sizes = Mapping[str, Any]
"""`hidden`, `layers`, and optionally `architecture` (qwen3, qwen3_moe, phi3), `tied`, `experts`."""


def build_model(sizes: Sizes, vocab_size: int, context: int, seed: int, attention: str = "sdpa") -> Any:
    """Return a model in fp32.

    Args:
        sizes: of the model.
        vocab_size: number of tokens that the model knows.
        context: the longest sequence, in tokens.
        seed: of the random weights.
        attention: transformers' `attn_implementation`.

    Raises:
        ValueError: there is no such architecture.
    """
    import torch
    import transformers

    names = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "phi3": "Phi3"}
    architecture = sizes.get("architecture", "qwen3")
    if architecture not in names:
        raise ValueError(f"architecture {architecture} is not known. Valid: {', '.join(names)}")
    hidden = sizes["hidden"]
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate(hidden),
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM,
        "max_position_embeddings": context,
        "tie_word_embeddings": sizes.get("tied", True),
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "use_cache": False,
        "attn_implementation": attention,
    }
    if architecture != "phi3":
        options["head_dim"] = HEAD_DIM
    if architecture == "qwen3_moe":
        options |= {"num_experts": sizes["experts"], "num_experts_per_tok": 2, "decoder_sparse_step": 1}
        options["moe_intermediate_size"] = intermediate(hidden) // 2
    config = getattr(transformers, f"{names[architecture]}Config")(**options)
    torch.manual_seed(seed)
    return getattr(transformers, f"{names[architecture]}ForCausalLM")(config)


def intermediate(hidden: int) -> int:
    """Return the width of the MLP, about 8/3 of the hidden size."""
    return hidden * 8 // 3 // 32 * 32


def parameters_of(sizes: Sizes) -> int:
    """Return about how many parameters take part in a token's FLOPs, without building the model."""
    hidden = sizes["hidden"]
    mlp = 3 * hidden * intermediate(hidden)  # of experts two of half this width
    embeddings = VOCAB_SIZE * hidden
    return int(sizes["layers"] * (4 * hidden**2 + mlp) + embeddings)
