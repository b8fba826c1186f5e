"""Mixtures of experts: their stacks, routers and gates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.routing.models import ATTENTION, MOE, TINY, build, layers, linear, muon_names, reasons


@pytest.mark.parametrize(
    ("model_class", "config_class", "options", "experts", "router"),
    [
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**TINY, **MOE}, "mlp.experts", "mlp.gate.weight"),
        ("MixtralForCausalLM", "MixtralConfig", {**TINY, "num_local_experts": 4}, "mlp.experts", "mlp.gate.weight"),
        (
            "GptOssForCausalLM",
            "GptOssConfig",
            {**TINY, "num_local_experts": 4, "head_dim": 8},
            "mlp.experts",
            "mlp.router.weight",
        ),
        ("OlmoeForCausalLM", "OlmoeConfig", {**TINY, "num_experts": 4}, "mlp.experts", "mlp.gate.weight"),
    ],
)
def test_mixtures_of_experts(model_class, config_class, options, experts, router):
    model = build(model_class, config_class, **options)
    routed = muon_names(model)
    adamw_reasons = reasons(model)
    assert layers(f"{experts}.gate_up_proj", f"{experts}.down_proj", *ATTENTION) <= routed
    for i in range(2):
        assert adamw_reasons[f"model.layers.{i}.{router}"] == "router of a mixture of experts"
    assert not any("bias" in name for name in routed)


class Experts(nn.Module):
    """Four experts in one tensor, as transformers stores them."""

    def __init__(self, flat=False):
        super().__init__()
        self.num_experts = 4
        self.down_proj = nn.Parameter(torch.zeros(4 * 8, 12) if flat else torch.zeros(4, 8, 12))


@pytest.mark.parametrize(
    ("modules", "router"),
    [
        ({"gate": linear(4)}, "gate.weight"),
        ({"gate": nn.ModuleDict({"wg": linear(4)})}, "gate.wg.weight"),
        ({"gate": nn.ModuleDict({"mlp": nn.Sequential(linear(6), linear(5, 6))})}, "gate.mlp.0.weight"),
        ({"scores": linear(4)}, "scores.weight"),
        ({"router": linear(6)}, "router.weight"),
        ({"altup": nn.ModuleDict({"modality_router": linear(6)})}, "altup.modality_router.weight"),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_routers(modules, router, listed):
    experts = nn.ModuleList([linear(8) for _ in range(4)]) if listed else Experts()
    layer = nn.ModuleDict({**modules, "experts": experts, "shared_expert": nn.ModuleDict({"gate_proj": linear(8)})})
    model = nn.ModuleDict({"mlp": layer})
    assert reasons(model)[f"mlp.{router}"] == "router of a mixture of experts"
    assert "mlp.shared_expert.gate_proj.weight" in muon_names(model)
    assert any("experts" in name for name in muon_names(model))


def test_a_gate_without_experts_is_a_matrix():
    assert muon_names(nn.ModuleDict({"mlp": nn.ModuleDict({"gate": linear(8)})})) == {"mlp.gate.weight"}


def test_three_dims_are_a_stack_only_where_experts_are():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Parameter(torch.zeros(16, 4, 8))
            self.latents = nn.Parameter(torch.zeros(6, 16))
            self.rel_pos_h = nn.Parameter(torch.zeros(6, 16))
            self.rel_pos_bias = linear(6)
            self.weight = nn.Parameter(torch.zeros(8, 8))
            self.flat = Experts(flat=True)

    adamw_reasons = reasons(Layer())
    assert muon_names(Layer()) == {"weight"}
    assert adamw_reasons["q"] == "three dims, not known as a stack of matrices (muon_patterns opts in)"
    assert adamw_reasons["latents"] == adamw_reasons["rel_pos_h"] == "table of learned vectors"
    assert adamw_reasons["rel_pos_bias.weight"] == "bias"
    assert adamw_reasons["flat.down_proj"] == "experts flattened into one matrix"
    assert "q" in muon_names(Layer(), muon_patterns="^q$")


def test_shared_expert_gate():
    model = build(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **{**TINY, **MOE, "shared_expert_intermediate_size": 24, "num_key_value_heads": 4},
    )
    assert reasons(model)["model.layers.0.mlp.shared_expert_gate.weight"] == "single row or column"
    assert layers("mlp.shared_expert.gate_proj.weight") <= muon_names(model)
