"""Small models with peft's adapters."""

from __future__ import annotations

import peft
import torch
import transformers
from torch import nn

SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, num_hidden_layers=2))


def adapted_model(**lora):
    """Return a Llama with LoRA factors."""
    return peft.get_peft_model(llama(), peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **lora}))


def with_adalora():
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"])
    return peft.get_peft_model(llama(), config)


def with_adapted_experts():
    """Return a model with factors of the stacked weights of all experts."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**SIZES, **HEADS, **experts, num_hidden_layers=1, head_dim=8)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    return peft.get_peft_model(transformers.Qwen3MoeForCausalLM(config), lora)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 12, 3)

    def forward(self, x):
        return self.conv(x)


def with_adapted_convolution():
    torch.manual_seed(0)
    return peft.get_peft_model(Convolution(), peft.LoraConfig(r=4, target_modules=["conv"]))
