"""A small checkpoint that commands are called on."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Return a small Qwen3 with 6 layers, and the folder of its checkpoint."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 6}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8))
    folder = tmp_path_factory.mktemp("small")
    model.save_pretrained(folder)
    return model, folder
