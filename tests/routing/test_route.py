"""The route of every parameter: by module, name, shape and structure; heads, and mixtures of experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer

from hf_muon import route_parameters
from hf_muon.plan import model_flops
from hf_muon.routing.model_facts import expert_counts
from hf_muon.routing.route import table
from tests.routing.models import (
    ATTENTION,
    GPT2,
    MLP,
    OUTSIDE,
    QWEN3,
    TINY,
    build,
    layers,
    linear,
    module,
    muon_names,
    muon_views,
    qwen3,
    reasons,
)

ROUTER = "router of a mixture of experts"
HEAD, ROWS, FEW = "head", "head: a row for each token", "head: few rows"
UNREAD = "a guess: head, no other weight reads its rows"


def test_every_parameter_has_a_route_and_every_route_a_reason():
    model = qwen3()
    routes = route_parameters(model)
    assert [route.name for route in routes] == [name for name, _ in model.named_parameters()]
    assert all(route.reason for route in routes)
    lines = table(routes).splitlines()
    assert lines[0].split() == ["parameter", "shape", "count", "optimizer", "reason"]
    assert any(line.split()[:4] == ["model.layers.*.mlp.up_proj.weight", "48x32", "2", "muon"] for line in lines)
    assert lines[-2].startswith("muon: 14 parameters, 15,360 weights (")
    assert lines[-1].startswith("adamw: 11 parameters")


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_found_by_structure(tied):
    """Rename both embeddings, so that only get_input_embeddings and get_output_embeddings identify them."""
    model = qwen3(tie_word_embeddings=tied)
    renamed = module(tokens=model.model.embed_tokens, out=model.lm_head, hidden=nn.Linear(32, 32, device="meta"))
    type(renamed).get_input_embeddings = lambda self: self.tokens
    type(renamed).get_output_embeddings = lambda self: self.out
    found = reasons(renamed)
    assert found["tokens.weight"] in ("the model's input embeddings", "the model's output embeddings")
    assert ("out.weight" in found) != tied
    assert muon_names(renamed) == {"hidden.weight"}


def test_plain_modules():
    model = module(
        table=nn.Embedding(100, 16),
        places=nn.Embedding(50, 16),
        up=nn.Linear(16, 32),
        down=nn.Linear(32, 16),
        ln=nn.LayerNorm(16),
        offset_bias=nn.Parameter(torch.zeros(4, 16)),
        heads_norm=nn.Parameter(torch.zeros(4, 16)),
        row=nn.Parameter(torch.zeros(1, 16)),
        column=linear(16, 1),
        conv=nn.Conv1d(16, 16, 3),
        depthwise=nn.Conv1d(16, 16, 3, groups=16),
        A_log=nn.Parameter(torch.zeros(16, 4)),
        scale=nn.Parameter(torch.zeros(())),
        out=linear(100, 16),
    )
    assert muon_names(model) == {"up.weight", "down.weight", "conv.weight"}
    assert reasons(model) == {
        **dict.fromkeys(("table.weight", "places.weight"), "embedding"),
        **dict.fromkeys(("up.bias", "down.bias", "ln.bias", "conv.bias", "depthwise.bias", "offset_bias"), "bias"),
        **dict.fromkeys(("ln.weight", "heads_norm"), "norm"),
        **dict.fromkeys(("row", "column.weight"), "single row or column"),
        "depthwise.weight": "depthwise convolution",
        "A_log": "state space parameter",
        "scale": "vector",
        "out.weight": ROWS,
    }


@pytest.mark.parametrize("name", ["ape", "index_kpool_compress_ape", "position_bias"])
def test_biases_of_positions_are_no_matrices(name):
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.zeros(16, 12)))
    assert not muon_names(model)


def test_embed_takes_no_backbone():
    """Ignore "embed" in the name of a container with layers or a whole model; heed it for modules inside."""
    with torch.device("meta"):
        layer = nn.ModuleDict({"up": linear(8), "down": linear(12, 8), "pos_embed": linear(9)})
        model = nn.ModuleDict(
            {
                "embedder": nn.ModuleDict({"encoder": nn.ModuleList([layer]), "proj": linear(5)}),
                "text_embedding": transformers.Qwen3Model(transformers.Qwen3Config(**QWEN3)),
                "time_embed": nn.Sequential(linear(6), linear(7, 6)),
                "patch_embed": nn.ModuleDict({"stem": nn.ModuleList([nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3)})])}),
                "box_embed": nn.ModuleList([nn.Sequential(linear(8), linear(7, 8)) for _ in range(2)]),
            }
        )
    expected = {"embedder.encoder.0.up.weight", "embedder.encoder.0.down.weight"}
    assert muon_names(model) == expected | layers(*ATTENTION, *MLP, prefix="text_embedding.layers")
    for name in (
        "embedder.proj",
        "time_embed.0",
        "box_embed.1.0",
        "embedder.encoder.0.pos_embed",
        "text_embedding.embed_tokens",
    ):
        assert reasons(model)[f"{name}.weight"] == "name contains 'embed'"


def test_frozen_parameters_have_no_route():
    model = qwen3()
    model.model.layers[0].requires_grad_(False)
    assert muon_names(model) == {name.replace(".0.", ".1.") for name in layers(*ATTENTION, *MLP, count=1)}


@pytest.mark.parametrize(
    ("kind", "head", "options"),
    [
        ("Qwen3ForCausalLM", None, QWEN3),
        ("GPT2LMHeadModel", None, GPT2),
        ("Qwen2ForCausalLM", None, TINY),
        ("Qwen3ForSequenceClassification", "score", QWEN3 | {"num_labels": 5}),
        ("Qwen3ForTokenClassification", "score", QWEN3 | {"num_labels": 5}),
        ("Qwen3ForQuestionAnswering", "qa_outputs", QWEN3),
        ("BertForSequenceClassification", "classifier", TINY | {"num_labels": 7}),
    ],
)
def test_heads_of_models_and_the_trainers_rule_for_decay(kind, head, options):
    model = build(kind, f"{kind.partition('For')[0].removesuffix('LMHeadModel')}Config", **options)
    assert muon_names(model)
    assert head is None or f"{head}.weight" in reasons(model)
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    assert {r.name for r in route_parameters(model) if r.decay} == decaying & {n for n, _ in model.named_parameters()}


def test_names_lose_wrappers_and_nothing_else():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = [route.name for route in route_parameters(model)]
    assert [route.name for route in route_parameters(torch.compile(model))] == names
    assert [route.name for route in route_parameters(nn.DataParallel(model))] == names
    own = nn.ModuleDict({"module": linear(4, 4), "submodule": linear(4, 4)})
    assert [route.name for route in route_parameters(own)] == ["module.weight", "submodule.weight"]


# --- heads, by place, name and rows


def test_what_is_beside_the_base_model_is_a_head():
    """Expect so of an MLP of any name, but not of layers, or of a tower with a base model of its own or without one."""

    def classifier(**beside):
        model = build("Qwen3ForSequenceClassification", "Qwen3Config", **QWEN3, num_labels=5)
        for name, own in beside.items():
            setattr(model, name, own)
        return model

    assert reasons(classifier(score=linear(1)))["score.weight"] == "single row or column"
    layer = nn.ModuleDict({"up": linear(48, 32), "down": linear(32, 48)})
    towers = {"text": qwen3(), "vision": build("ViTModel", "ViTConfig", **TINY)}
    model = classifier(verdict=nn.Sequential(linear(24, 32), linear(20, 24)), mtp=nn.ModuleList([layer]), **towers)
    found = {name for name, reason in reasons(model).items() if reason == OUTSIDE}
    assert found == {"score.weight", "verdict.0.weight", "verdict.1.weight"}
    vision = {name for name in muon_names(model) if name.startswith("vision.")}
    own = layers(*ATTENTION, *MLP, prefix="text.model.layers")
    assert muon_names(model) == layers(*ATTENTION, *MLP) | own | vision | {"mtp.0.up.weight", "mtp.0.down.weight"}
    assert "vision.pooler.dense.weight" in vision


def test_heads_by_name():
    """A tower that pools tokens by an attention may call it a head."""

    def attention():
        return module(v_head=linear(8), k_proj=linear(8))

    heads = ("head", "score", "classifier", "value_head", "multi_head")
    model = nn.ModuleDict({name: linear(8) for name in heads} | {"heads": nn.ModuleDict({"age": linear(90)})})
    assert set(reasons(model).values()) == {HEAD}
    model = nn.ModuleDict({"layers": nn.ModuleList([attention()]), "head": attention(), "trunk": linear(8)})
    pooling = "head.k_proj.weight"  # the pooling head's own v_head is a head, by its name
    assert muon_names(model) == {"layers.0.v_head.weight", "layers.0.k_proj.weight", pooling, "trunk.weight"}


def own_model(**beside):
    """Return a model of one's own with a table of 500 tokens, two layers of hidden size 64, and what is beside them."""
    blocks = nn.ModuleList([nn.ModuleDict({"up": linear(96, 64), "down": linear(64, 96)}) for _ in range(2)])
    return module(tokens=nn.Embedding(500, 64), **beside, blocks=blocks)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"logits": linear(500, 64)}, {"logits": ROWS}),
        ({"logits": linear(500, 64), "value": linear(1, 64)}, {"logits": ROWS, "value": "single row or column"}),
        ({"logits": linear(501, 64)}, {"logits": ROWS}),
        ({"logits": linear(507, 64)}, {"logits": ROWS}),  # a table or a head is padded
        ({"logits": linear(508, 64)}, {"logits": UNREAD}),
        ({"up": linear(64, 48), "logits": linear(500, 64)}, {"logits": ROWS}),
        (
            {"of_codebooks": nn.ModuleList([linear(500, 64) for _ in range(2)])},
            {f"of_codebooks.{i}": ROWS for i in (0, 1)},
        ),
        ({"ctc": nn.Conv1d(64, 500, 1, bias=False)}, {"ctc": ROWS}),
        ({"wide": linear(500, 64), "narrow": linear(64, 500)}, {}),  # an MLP
        ({"box": nn.Sequential(linear(64, 64), linear(4, 64))}, {"box.1": FEW}),
        ({"pixels": nn.Conv2d(64, 3, 3, bias=False)}, {"pixels": FEW}),
        ({"q": linear(18, 512), "k_proj": linear(16, 512)}, {}),
        ({"few": linear(64, 1024)}, {"few": FEW}),
        ({"few": linear(64, 1023)}, {}),
        ({"few": linear(65, 2048)}, {}),
        # A module for a later token has a head; what else layers put out may be parts of something.
        (
            {"more": nn.ModuleList([nn.ModuleDict({"gates": linear(4, 64), "out": linear(500, 64)})])},
            {"more.0.out": ROWS},
        ),
        ({"more": nn.ModuleList([nn.ModuleDict({"gates": linear(4, 64), "out": linear(508, 64)})])}, {}),
    ],
)
def test_heads_of_a_model_of_ones_own(beside, expected):
    expected = {f"{name}.weight": reason for name, reason in expected.items()}
    assert reasons(own_model(**beside)) == expected | {"tokens.weight": "embedding"}


# --- mixtures of experts


@pytest.mark.parametrize(
    ("modules", "router"),
    [
        ({"gate": linear(4)}, "gate"),
        ({"gate": nn.ModuleDict({"wg": linear(4)})}, "gate.wg"),
        ({"gate": nn.ModuleDict({"mlp": nn.Sequential(linear(6), linear(5, 6))})}, "gate.mlp.0"),
        ({"scores": linear(4)}, "scores"),
        ({"router": linear(6)}, "router"),
        ({"altup": nn.ModuleDict({"modality_router": linear(6)})}, "altup.modality_router"),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_routers(modules, router, listed):
    stored = module(num_experts=4, down_proj=nn.Parameter(torch.zeros(4, 8, 12)))  # as transformers stores them
    experts = nn.ModuleList([linear(8) for _ in range(4)]) if listed else stored
    layer = nn.ModuleDict({**modules, "experts": experts, "shared_expert": nn.ModuleDict({"gate_proj": linear(8)})})
    model = nn.ModuleDict({"mlp": layer})
    assert reasons(model)[f"mlp.{router}.weight"] == ROUTER
    assert "mlp.shared_expert.gate_proj.weight" in muon_names(model)
    assert any("experts" in name for name in muon_names(model))
    assert muon_names(nn.ModuleDict({"mlp": nn.ModuleDict({"gate": linear(8)})})) == {"mlp.gate.weight"}


def test_three_dims_are_a_stack_only_where_experts_are():
    model = module(
        q=nn.Parameter(torch.zeros(16, 4, 8)),
        latents=nn.Parameter(torch.zeros(6, 16)),
        rel_pos_h=nn.Parameter(torch.zeros(6, 16)),
        rel_pos_bias=linear(6),
        weight=nn.Parameter(torch.zeros(8, 8)),
        flat=module(num_experts=4, down_proj=nn.Parameter(torch.zeros(4 * 8, 12))),
    )
    assert muon_names(model) == {"weight"}
    assert reasons(model) == {
        "q": "three dims, not known as a stack of matrices (muon_patterns opts in)",
        "latents": "table of learned vectors",
        "rel_pos_h": "table of learned vectors",
        "rel_pos_bias.weight": "bias",
        "flat.down_proj": "experts flattened into one matrix",
    }
    assert "q" in muon_names(model, muon_patterns="^q$")


def test_counts_of_experts_are_integers_with_the_usual_name_first():
    owner = SimpleNamespace(n_experts=6, num_experts=4, num_local_experts=None, n_routed_experts="5", experts=3)
    assert expert_counts(owner) == [4, 6]
    assert expert_counts(SimpleNamespace()) == expert_counts(None) == []


@pytest.mark.parametrize(
    "name", ["num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts"]
)
def test_each_name_of_a_number_of_experts_serves_routes_and_plans(name):
    def stack(**counts):  # four matrices under a name that says nothing about experts
        return module(weights=nn.Parameter(torch.zeros(4, 8, 12)), **counts)

    assert muon_names(stack(**{name: 4})) == {"weights"}
    assert not muon_names(stack(**{name: 3}))
    model = nn.ModuleDict({"experts": stack()})
    model.config = SimpleNamespace(**{name: 4, "num_experts_per_tok": 2})
    assert model_flops(model) == 6 * 2 * 8 * 12
    model.config = SimpleNamespace()
    assert model_flops(model) == 6 * 4 * 8 * 12


# --- views of convolutions and of fused weights


def test_convolutions():
    with torch.device("meta"):
        model = module(
            line=nn.Conv1d(6, 10, 3),
            grouped=nn.Conv2d(6, 8, 3, groups=2),
            volume=nn.Conv3d(6, 8, 2),
            back=nn.ConvTranspose2d(6, 8, 3),
            back_grouped=nn.ConvTranspose1d(6, 9, 3, groups=3),
            depthwise=nn.Conv2d(6, 12, 3, groups=6),
            out=nn.Conv2d(6, 1, 3),
            thin=nn.Conv1d(6, 3, 3, groups=3),
            point=nn.Conv1d(1, 8, 1),
        )
    assert muon_views(model) == {
        "line.weight": ("flat", "convolution"),
        "grouped.weight": ("flat, rows 2x4", "convolution"),
        "volume.weight": ("flat", "convolution"),
        "back.weight": ("transposed, flat", "convolution"),
        "back_grouped.weight": ("transposed, flat, rows 3x2", "convolution"),
    }
    adamw_reasons = reasons(model)
    assert adamw_reasons["depthwise.weight"] == "depthwise convolution"
    single = "convolution of a single row or column"
    assert {adamw_reasons[f"{name}.weight"] for name in ("out", "thin", "point")} == {single}
    assert muon_views(model, muon_patterns="depthwise")["depthwise.weight"] == ("flat", "muon_patterns 'depthwise'")


QKV = "transposed, columns 32+32+32"
C_ATTN = "transformer.h.0.attn.c_attn.weight"


def gpt2():
    return build("GPT2LMHeadModel", "GPT2Config", **GPT2 | {"n_layer": 1})


class TestFused:
    """Cases without a table in tests/golden: options, adapters, and unknown code."""

    def test_options(self):
        assert muon_views(gpt2())[C_ATTN] == (QKV, "hidden matrix: q, k, v")
        assert muon_views(gpt2(), per_head="true")[C_ATTN] == ("transposed, columns 12x8", "hidden matrix: q, k, v")
        assert muon_views(gpt2(), muon_patterns="c_attn")[C_ATTN] == (QKV, "muon_patterns 'c_attn'")

    def test_sizes_that_do_not_make_up_the_weight_leave_it_whole(self):
        model = build("Phi3ForCausalLM", "Phi3Config", **TINY, pad_token_id=0)
        attention = model.model.layers[0].self_attn
        attention.qkv_proj = nn.Linear(32, 65, bias=False, device="meta")
        assert muon_views(model)["model.layers.0.self_attn.qkv_proj.weight"] == ("", "hidden matrix")
        assert muon_views(model)["model.layers.1.self_attn.qkv_proj.weight"][0] == "rows 32+16+16"

    def test_heads_of_queries_that_are_not_compressed(self):
        """Expect the heads of whole queries; `head_dim` of these configurations is only the rotary part."""
        latent = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
        model = build("DeepseekV2ForCausalLM", "DeepseekV2Config", **TINY, **latent, first_k_dense_replace=2)
        view, _ = muon_views(model, per_head=True)["model.layers.0.self_attn.q_proj.weight"]
        assert view == "rows 4x10"

    def test_wrapped_subclassed_and_adapted_modules(self):
        import peft

        attention = type(gpt2().transformer.h[0].attn)
        model = gpt2()
        model.transformer.h[0].attn.__class__ = type("FlashAttentionOfMine", (attention,), {})
        view = (QKV, "hidden matrix: q, k, v")
        assert muon_views(model)[C_ATTN] == muon_views(torch.compile(model))[C_ATTN] == view
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["c_fc"], fan_in_fan_out=True)
        adapted = peft.get_peft_model(gpt2(), config)
        adapted.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight.requires_grad_(True)
        views = muon_views(adapted, lora="muon")
        prefix = "base_model.model.transformer.h.0"
        assert views[f"{prefix}.attn.c_attn.base_layer.weight"] == view
        assert views[f"{prefix}.attn.c_attn.lora_B.default.weight"] == ("", "LoRA factor, lora=muon")
        assert views[f"{prefix}.mlp.c_fc.modules_to_save.default.weight"] == ("transposed", "hidden matrix")
        assert len(views) == 4

    def test_tied_and_frozen_weights(self):
        model = build("Phi3ForCausalLM", "Phi3Config", **TINY, pad_token_id=0, tie_word_embeddings=True)
        model.model.layers[1].mlp.gate_up_proj.weight = model.model.layers[0].mlp.gate_up_proj.weight
        model.model.layers[0].self_attn.qkv_proj.weight.requires_grad_(False)
        views = muon_views(model)
        assert views["model.layers.0.mlp.gate_up_proj.weight"][0] == "rows 48+48"
        assert "model.layers.1.mlp.gate_up_proj.weight" not in views
        assert "model.layers.0.self_attn.qkv_proj.weight" not in views
        assert "model.layers.1.self_attn.qkv_proj.weight" in views
