"""Small models of transformers on the meta device, and their routes by name."""

from __future__ import annotations

import torch
import transformers
from torch import nn

from hf_muon import route_parameters

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
MOE = {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "decoder_sparse_step": 1,
}
ATTENTION = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
MLP = [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]


def build(model_class, config_class, **options):
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):
        return getattr(transformers, model_class)(config)


def qwen3(**options):
    return build("Qwen3ForCausalLM", "Qwen3Config", **{**TINY, "head_dim": 8, **options})


def backbone(**config):
    return transformers.Qwen3Model(transformers.Qwen3Config(**TINY, head_dim=8, **config))


def linear(rows, columns=12):
    return nn.Linear(columns, rows, bias=False)


def layers(*names, count=2, prefix="model.layers"):
    """Return these names in every layer."""
    return {f"{prefix}.{i}.{name}" for i in range(count) for name in names}


def muon_names(model, **options):
    """Return the names of the parameters that Muon gets."""
    return {route.name for route in route_parameters(model, **options) if route.use_muon}


def reasons(model, **options):
    """Return the reasons of the parameters that AdamW gets, by name."""
    return {route.name: route.reason for route in route_parameters(model, **options) if not route.use_muon}


def muon_views(model, **options):
    """Return view and reason of the parameters that Muon gets, by name."""
    return {route.name: (route.view, route.reason) for route in route_parameters(model, **options) if route.use_muon}
