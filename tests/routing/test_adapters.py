"""Factors of every adapter of peft go to AdamW, and what peft trains as it is goes where it goes without peft."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import peft
import pytest
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as KINDS
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_muon import route_parameters
from hf_muon.build import require_muon
from hf_muon.storage.views import parse
from tests.routing.models import TINY, linear, module, reasons

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
TOKENS = {"num_virtual_tokens": 4}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 8}
# Options of kinds that need others than their targets.
OPTIONS = {
    "ADALORA": [TARGETS | {"total_step": 10}],
    "ADAPTION_PROMPT": [{"adapter_len": 4, "adapter_layers": 2}],
    "BOFT": [TARGETS | {"boft_block_size": 4}],
    "C3A": [TARGETS | {"block_size": 16}],
    "CARTRIDGE": [TOKENS],
    "CPT": [{"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]}],
    "FOURIERFT": [TARGETS | {"n_frequency": 16}],
    "IA3": [TARGETS | {"feedforward_modules": []}],
    "LN_TUNING": [{}],
    "LORA": [TARGETS, TARGETS | {"use_dora": True}, {"target_modules": ["embed_tokens"]}],
    "MISS": [TARGETS | {"r": 8}],
    "MULTITASK_PROMPT_TUNING": [TOKENS | {"num_tasks": 2}],
    "OFT": [TARGETS | {"oft_block_size": 4, "r": 0}],
    "POLY": [TARGETS | {"n_tasks": 2, "n_splits": 2, "r": 4}],
    "PREFIX_TUNING": [TOKENS, TOKENS | {"prefix_projection": True, "encoder_hidden_size": 32}],
    "PROMPT_TUNING": [TOKENS],
    "PSOFT": [TARGETS | {"r": 8}],
    "P_TUNING": [TOKENS, TOKENS | {"encoder_hidden_size": 32, "encoder_reparameterization_type": "LSTM"}],
    "ROAD": [TARGETS | {"group_size": 8}],
    "SHIRA": [TARGETS | {"r": 4}],
    "TRAINABLE_TOKENS": [{"token_indices": [1, 2], "target_modules": ["embed_tokens"]}],
    "VBLORA": [TARGETS | {"num_vectors": 16, "vector_length": 8, "topk": 2}],
    "WAVEFT": [TARGETS | {"n_frequency": 16}],
    "XLORA": [{"adapters": {}, "hidden_size": 32}],
}
CASES = [(kind.value, options) for kind in KINDS for options in OPTIONS.get(kind.value, [TARGETS])]


def base(kind="Llama", **options):
    config = getattr(transformers, f"{kind}Config")(**(TINY | {"use_cache": False} | options))
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def adapted(kind, options, model=None):
    config = {own.value: config for own, config in KINDS.items()}[kind]
    torch.manual_seed(0)
    return peft.get_peft_model(model or base(), config(task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_factors_of_every_kind_go_to_adamw(kind, options):
    if kind == "ADAMSS" and importlib.util.find_spec("sklearn") is None:
        return
    routes = route_parameters(adapted(kind, options))
    assert routes
    assert [route.name for route in routes if route.use_muon or not route.adapter] == []
    with pytest.raises(ValueError, match=r"Only .* factors are trained.*\[lora-without-muon\]"):
        require_muon(routes, kind)


@pytest.mark.parametrize("kind", ["LORA", "LOHA", "OFT", "IA3", "P_TUNING", "ADAPTION_PROMPT", "TRAINABLE_TOKENS"])
def test_weights_of_the_model_keep_their_routes_in_an_adapter(kind):
    model = base()
    plain = {route.parameter: (route.use_muon, route.view, route.reason) for route in route_parameters(model)}
    wrapped = adapted(kind, OPTIONS.get(kind, [TARGETS])[0], model)
    for parameter in plain:
        parameter.requires_grad_(True)
    routes = [route for route in route_parameters(wrapped) if route.parameter in plain]
    assert len(routes) == len(plain)
    assert not any(route.adapter for route in routes)
    assert {route.parameter: (route.use_muon, route.view, route.reason) for route in routes} == plain


@pytest.mark.parametrize("kind", ["LORA", "LOHA"])
def test_modules_to_save(kind):
    """Expect a hidden matrix, a head and an embedding to go where they go without peft."""
    model = adapted(kind, TARGETS | {"modules_to_save": ["up_proj", "lm_head", "embed_tokens"]})
    saved = {route.name: route for route in route_parameters(model) if "modules_to_save" in route.name}
    assert len(saved) == 4
    assert {name for name, route in saved.items() if route.use_muon} == {name for name in saved if "up_proj" in name}
    assert not any(route.adapter for route in saved.values())


def test_tokens_that_peft_trains():
    model = module(tok=nn.Embedding(20, 12), up=linear(24), down=linear(12, 24))
    model.forward = lambda x: model.down(model.up(model.tok(x)))
    config = peft.LoraConfig(r=4, target_modules=["up"], trainable_token_indices={"tok": [1, 2]})
    reason = {name: text for name, text in reasons(peft.get_peft_model(model, config)).items() if "tok" in name}
    assert set(reason.values()) == {"rows of an embedding"}


def test_layers_of_ones_own_that_derive_from_an_adapters():
    """Find factors by the class of the module that holds them, LyCORIS' ones also; LoRA by its name in any module."""
    tuner = type("Tuner", (nn.Module, BaseTunerLayer), {})()
    tuner.scale_a, tuner.base_layer = nn.Parameter(torch.zeros(8, 12)), linear(8)
    lycoris = type("LohaModule", (nn.Module,), {"__module__": "lycoris.modules.loha"})()
    lycoris.hada_w1_a = nn.Parameter(torch.zeros(8, 4))
    lora = module(up=linear(8), lora_up=linear(8, 4))
    found = reasons(nn.ModuleDict({"tuner": tuner, "lycoris": lycoris, "own": lora}))
    assert found == {
        **dict.fromkeys(("tuner.scale_a", "lycoris.hada_w1_a"), "adapter factor (muon_patterns opts in)"),
        "own.lora_up.weight": "name contains 'lora' (lora=muon opts in)",
    }


def test_a_model_without_adapters_does_not_import_peft():
    code = (
        "import sys, hf_muon; from torch import nn; hf_muon.route_parameters(nn.Linear(4, 4)); "
        "assert 'peft' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# --- LoRA of stacked experts


def with_experts(rank):
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"r": rank, "target_modules": ["q_proj"], "target_parameters": parameters, "init_lora_weights": False}
    return adapted("LORA", options, base("Qwen3Moe", **MOE))


def parts_of(route):
    view = parse(route.view)
    indices = [
        [part.start + block * part.stride + i for block in range(part.count) for i in range(part.size)]
        for part in view.parts
    ]
    return [route.parameter.data.index_select(view.axis, torch.tensor(own)) for own in indices]


@torch.no_grad()
def test_factors_of_stacked_experts_are_a_matrix_for_each_expert():
    """Compare the products of the parts with what peft adds to the weight of each expert."""
    model = with_experts(4)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    routes = {route.name: route for route in route_parameters(model, lora="muon")}
    stacks = [route for name, route in routes.items() if name.endswith(("gate_up_proj", "down_proj"))]
    assert {route.view for route in stacks} == {"rows 20+20", ""}
    layers = {name: layer for name, layer in model.named_modules() if type(layer).__name__ == "ParamWrapper"}
    assert len(layers) == 4
    for name, layer in layers.items():
        a, b = (parts_of(routes[f"{name}.lora_{factor}.default.weight"]) for factor in "AB")
        assert len(a) == len(b) == layer.num_experts == 3
        for expert, change in enumerate(layer.get_delta_weight("default")):
            product = b[expert] @ a[expert] * layer.scaling["default"]
            assert torch.allclose(product if product.shape == change.shape else product.T, change, atol=1e-6)


def test_factors_of_stacked_experts_with_a_single_row_or_column_each():
    found = {name: text for name, text in reasons(with_experts(1), lora="muon").items() if "experts" in name}
    assert len(found) == 8
    assert set(found.values()) == {"expert of a single row or column"}
