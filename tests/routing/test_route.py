"""The route of every parameter: by module, name, shape and structure."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_muon import route_parameters
from hf_muon.routing.route import table
from tests.routing.models import ATTENTION, MLP, TINY, backbone, build, layers, linear, muon_names, qwen3, reasons


def test_dense_model():
    assert muon_names(qwen3()) == layers(*ATTENTION, *MLP)


def test_every_decision_has_a_reason_and_every_parameter_a_route():
    model = qwen3()
    routes = route_parameters(model)
    assert [route.name for route in routes] == [name for name, _ in model.named_parameters()]
    assert all(route.reason for route in routes)
    by_name = {route.name: route.reason for route in routes}
    assert by_name["model.embed_tokens.weight"] == "name contains 'embed'"
    assert by_name["lm_head.weight"] == "name contains 'lm_head'"
    assert by_name["model.norm.weight"] == "norm"
    assert by_name["model.layers.0.self_attn.q_proj.weight"] == "hidden matrix"


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_found_by_structure(tied):
    """Rename both embeddings, so that only get_input_embeddings and get_output_embeddings identify them."""
    model = build("Qwen3ForCausalLM", "Qwen3Config", **TINY, head_dim=8, tie_word_embeddings=tied)

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = model.model.embed_tokens
            self.out = model.lm_head
            self.hidden = nn.Linear(32, 32, device="meta")

        def get_input_embeddings(self):
            return self.tokens

        def get_output_embeddings(self):
            return self.out

    adamw_reasons = reasons(Renamed())
    assert adamw_reasons["tokens.weight"] in ("the model's input embeddings", "the model's output embeddings")
    assert ("out.weight" in adamw_reasons) != tied
    assert muon_names(Renamed()) == {"hidden.weight"}


def test_plain_modules():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 16)
            self.places = nn.Embedding(50, 16)
            self.up = nn.Linear(16, 32)
            self.down = nn.Linear(32, 16)
            self.ln = nn.LayerNorm(16)
            self.offset_bias = nn.Parameter(torch.zeros(4, 16))
            self.heads_norm = nn.Parameter(torch.zeros(4, 16))
            self.row = nn.Parameter(torch.zeros(1, 16))
            self.column = nn.Linear(1, 16, bias=False)
            self.conv = nn.Conv1d(16, 16, 3)
            self.depthwise = nn.Conv1d(16, 16, 3, groups=16)
            self.A_log = nn.Parameter(torch.zeros(16, 4))
            self.scale = nn.Parameter(torch.zeros(()))
            self.out = nn.Linear(16, 100, bias=False)

    assert muon_names(Plain()) == {"up.weight", "down.weight", "conv.weight"}
    assert reasons(Plain()) == {
        "table.weight": "embedding",
        "places.weight": "embedding",
        "up.bias": "bias",
        "down.bias": "bias",
        "ln.weight": "norm",
        "ln.bias": "bias",
        "offset_bias": "bias",
        "heads_norm": "norm",
        "row": "single row or column",
        "column.weight": "single row or column",
        "conv.bias": "bias",
        "depthwise.weight": "depthwise convolution",
        "depthwise.bias": "bias",
        "A_log": "state space parameter",
        "scale": "vector",
        "out.weight": "output head: the last matrix, of the vocabulary's shape",
    }


def test_gpt2_names():
    model = build("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    expected = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    assert muon_names(model) == layers(*expected, prefix="transformer.h")
    assert reasons(model)["transformer.wpe.weight"] == "name contains 'wpe'"


def test_embed_takes_no_backbone():
    """Ignore "embed" in the name of a container with layers or a whole model; heed it for modules inside."""
    with torch.device("meta"):
        layer = nn.ModuleDict({"up": linear(8), "down": linear(12, 8), "pos_embed": linear(9)})
        model = nn.ModuleDict(
            {
                "embedder": nn.ModuleDict({"encoder": nn.ModuleList([layer]), "proj": linear(5)}),
                "text_embedding": backbone(),
                "time_embed": nn.Sequential(linear(6), linear(7, 6)),
                "patch_embed": nn.ModuleDict({"stem": nn.ModuleList([nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3)})])}),
            }
        )
    expected = {"embedder.encoder.0.up.weight", "embedder.encoder.0.down.weight"}
    assert muon_names(model) == expected | layers(*ATTENTION, *MLP, prefix="text_embedding.layers")
    adamw_reasons = reasons(model)
    for name in ("embedder.proj", "time_embed.0", "embedder.encoder.0.pos_embed", "text_embedding.embed_tokens"):
        assert adamw_reasons[f"{name}.weight"] == "name contains 'embed'"


def test_frozen_parameters_have_no_route():
    model = qwen3()
    model.model.layers[0].requires_grad_(False)
    assert muon_names(model) == {name.replace(".0.", ".1.") for name in layers(*ATTENTION, *MLP, count=1)}


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        ("Qwen3ForCausalLM", "Qwen3Config", {**TINY, "head_dim": 8}),
        ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
        ("BertForSequenceClassification", "BertConfig", TINY),
        ("Qwen2ForCausalLM", "Qwen2Config", TINY),
    ],
)
def test_decay_is_the_trainers_rule(model_class, config_class, options):
    model = build(model_class, config_class, **options)
    decaying = Trainer.get_decay_parameter_names(None, model)
    for route in route_parameters(model):
        assert route.decay == (route.name in decaying), route.name


def test_names_lose_wrappers_and_nothing_else():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = [route.name for route in route_parameters(model)]
    assert [route.name for route in route_parameters(torch.compile(model))] == names
    assert [route.name for route in route_parameters(nn.DataParallel(model))] == names
    own = nn.ModuleDict({"module": nn.Linear(4, 4, bias=False), "submodule": nn.Linear(4, 4, bias=False)})
    assert [route.name for route in route_parameters(own)] == ["module.weight", "submodule.weight"]


def test_table():
    text = table(route_parameters(qwen3()))
    lines = text.splitlines()
    assert lines[0].split() == ["parameter", "shape", "count", "optimizer", "reason"]
    assert any(line.split()[:4] == ["model.layers.*.mlp.up_proj.weight", "48x32", "2", "muon"] for line in lines)
    assert lines[-2].startswith("muon: 14 parameters, 15,360 weights (")
    assert lines[-1].startswith("adamw: 11 parameters")
