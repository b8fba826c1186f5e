"""Small models on the meta device, and their routes by name."""

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
QWEN3 = TINY | {"head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
ATTENTION = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
OUTSIDE = "head: outside of the base model"
MLP = [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]


def build(model_class, config_class, **options):
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):
        return getattr(transformers, model_class)(config)


def qwen3(**options):
    return build("Qwen3ForCausalLM", "Qwen3Config", **QWEN3, **options)


def linear(rows, columns=12):
    return nn.Linear(columns, rows, bias=False)


def module(forward=None, **content):
    """Return a module of a class of its own with these submodules, parameters, numbers and forward."""
    model = type("Own", (nn.Module,), {"forward": forward} if forward else {})()
    for name, value in content.items():
        setattr(model, name, value)
    return model


def layers(*names, count=2, prefix="model.layers"):
    """Return these names in every layer."""
    return {f"{prefix}.{i}.{name}" for i in range(count) for name in names}


def muon_views(model, **options):
    """Return view and reason of the parameters that Muon gets, by name."""
    return {route.name: (route.view, route.reason) for route in route_parameters(model, **options) if route.use_muon}


def muon_names(model, **options):
    return set(muon_views(model, **options))


def reasons(model, **options):
    """Return the reasons of the parameters that AdamW gets, by name."""
    return {route.name: route.reason for route in route_parameters(model, **options) if not route.use_muon}
