"""Real architectures, compared with the tables in tests/golden/routes. `make golden` rewrites the tables."""

from __future__ import annotations

import pytest

from hf_muon import route_parameters
from tests.support.zoo import ZOO, build, table


@pytest.mark.every_stack
@pytest.mark.promise("routes")
@pytest.mark.parametrize("name", ZOO)
def test_routes_and_views_are_the_committed_ones(name, golden):
    """Compare the table; where heads are matrices of their own, only views differ, and those of MLPs do not."""
    model = build(name)
    golden(f"routes/{name}", table(name, model))
    if model is None:
        return
    heads = {route.name: route for route in route_parameters(model, per_head=True)}
    for route in route_parameters(model):
        own = heads[route.name]
        assert (route.use_muon, route.reason) == (own.use_muon, own.reason)
        if any(word in route.reason for word in (" gate, up", " x, gate", " dt, B, C")):
            assert own.view == route.view


@pytest.mark.parametrize(
    ("name", "weight", "view"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight", "rows 32x128"),
        ("llama", "model.layers.0.self_attn.o_proj.weight", ""),
        ("llama", "model.layers.0.mlp.gate_proj.weight", ""),
        ("mistral", "model.layers.0.self_attn.k_proj.weight", "rows 8x128"),
        ("t5", "encoder.block.0.layer.0.SelfAttention.k.weight", "rows 8x64"),
        ("bert", "bert.encoder.layer.0.attention.self.value.weight", "rows 12x64"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", "transposed, columns 36x64"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", "rows 192x96"),
        ("falcon_40b", "transformer.h.0.self_attention.query_key_value.weight", "rows 144x64"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", "rows 96x96"),
        ("deepseek_v3", "model.layers.0.self_attn.q_b_proj.weight", "rows 128x192"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", "rows 256x128"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight", "rows 96x128"),
        ("qwen3_next", "model.layers.3.self_attn.q_proj.weight", "rows 32x256"),
        ("qwen2_5_vl", "model.visual.blocks.0.attn.qkv.weight", "rows 48x224"),
    ],
)
def test_heads(name, weight, view):
    views = {route.name: route.view for route in route_parameters(build(name), per_head=True)}
    assert views[weight] == view
