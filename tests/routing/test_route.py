from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer

from hf_muon import route_parameters
from hf_muon.routing.table import table

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


def build(model_class, config_class, **options):
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):
        return getattr(transformers, model_class)(config)


def qwen3(**options):
    return build("Qwen3ForCausalLM", "Qwen3Config", **{**TINY, "head_dim": 8, **options})


def muon_names(model, **options):
    return {route.name for route in route_parameters(model, **options) if route.use_muon}


def reasons(model, **options):
    return {route.name: route.reason for route in route_parameters(model, **options) if not route.use_muon}


ATTENTION = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
MLP = [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]


def layers(*names, count=2, prefix="model.layers"):
    return {f"{prefix}.{i}.{name}" for i in range(count) for name in names}


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
    """GPT-NeoX calls them embed_in and embed_out; renamed, only the model's own report is left."""
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

    found = reasons(Renamed())
    assert found["tokens.weight"] in ("the model's input embeddings", "the model's output embeddings")
    assert ("out.weight" in found) != tied
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
    found = reasons(model)
    assert layers(f"{experts}.gate_up_proj", f"{experts}.down_proj", *ATTENTION) <= routed
    for i in range(2):
        assert found[f"model.layers.{i}.{router}"] == "router of a mixture of experts"
    assert not any("bias" in name for name in routed)


class Experts(nn.Module):
    """Four experts in one tensor, as transformers keeps them."""

    def __init__(self, flat=False):
        super().__init__()
        self.num_experts = 4
        self.down_proj = nn.Parameter(torch.zeros(4 * 8, 12) if flat else torch.zeros(4, 8, 12))


def linear(rows, columns=12):
    return nn.Linear(columns, rows, bias=False)


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

    found = reasons(Layer())
    assert muon_names(Layer()) == {"weight"}
    assert found["q"] == "three dims, not known as a stack of matrices (muon_patterns opts in)"
    assert found["latents"] == found["rel_pos_h"] == "table of learned vectors"
    assert found["rel_pos_bias.weight"] == "bias"
    assert found["flat.down_proj"] == "experts flattened into one matrix"
    assert "q" in muon_names(Layer(), muon_patterns="^q$")


def test_names_that_only_look_like_lora():
    model = nn.ModuleDict({"floral": linear(8), "exploration": linear(8)})
    assert muon_names(model) == {"floral.weight", "exploration.weight"}


def test_shared_expert_gate():
    model = build(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **{**TINY, **MOE, "shared_expert_intermediate_size": 24, "num_key_value_heads": 4},
    )
    assert reasons(model)["model.layers.0.mlp.shared_expert_gate.weight"] == "single row or column"
    assert layers("mlp.shared_expert.gate_proj.weight") <= muon_names(model)


@pytest.mark.parametrize(
    ("model_class", "config_class", "options", "head"),
    [
        ("Qwen3ForSequenceClassification", "Qwen3Config", {**TINY, "head_dim": 8, "num_labels": 5}, "score.weight"),
        ("Qwen3ForTokenClassification", "Qwen3Config", {**TINY, "head_dim": 8, "num_labels": 5}, "score.weight"),
        ("Qwen3ForQuestionAnswering", "Qwen3Config", {**TINY, "head_dim": 8}, "qa_outputs.weight"),
        ("BertForSequenceClassification", "BertConfig", {**TINY, "num_labels": 7}, "classifier.weight"),
    ],
)
def test_heads(model_class, config_class, options, head):
    model = build(model_class, config_class, **options)
    assert head in reasons(model)
    assert muon_names(model)


def test_value_head_of_one_row():
    model = build("Qwen3ForSequenceClassification", "Qwen3Config", **TINY, head_dim=8, num_labels=1)
    assert reasons(model)["score.weight"] == "single row or column"


def test_a_row_per_label_is_a_head_whatever_its_name():
    model = build("Qwen3ForSequenceClassification", "Qwen3Config", **TINY, head_dim=8, num_labels=5)
    model.verdict, model.score = model.score, nn.Identity()
    model.extra = nn.Linear(32, 24, device="meta")
    model.score_head = nn.Linear(32, 24, device="meta")
    assert reasons(model)["verdict.weight"] == reasons(model)["score_head.weight"] == "head"
    assert "extra.weight" in muon_names(model)


def test_heads_of_a_model_without_a_base():
    model = nn.ModuleDict({"multi_head": linear(8), "head": linear(8), "value_head": nn.Sequential(linear(8))})
    assert muon_names(model) == {"multi_head.weight"}


def test_gpt2_names():
    model = build("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    expected = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    assert muon_names(model) == layers(*expected, prefix="transformer.h")
    assert reasons(model)["transformer.wpe.weight"] == "name contains 'wpe'"


def seen(model, **options):
    return {route.name: (route.view, route.reason) for route in route_parameters(model, **options) if route.use_muon}


def backbone(**config):
    return transformers.Qwen3Model(transformers.Qwen3Config(**TINY, head_dim=8, **config))


def test_embed_takes_no_backbone():
    """A layer, or a model, that stands under such a name is none; what is called so inside of it is."""
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
    found = reasons(model)
    for name in ("embedder.proj", "time_embed.0", "embedder.encoder.0.pos_embed", "text_embedding.embed_tokens"):
        assert found[f"{name}.weight"] == "name contains 'embed'"


def test_heads_inside_the_base_model():
    config = transformers.FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=50,
        tgt_vocab_size=60,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        found = reasons(transformers.FSMTForConditionalGeneration(config))
    assert found["model.decoder.output_projection.weight"] == "head"


def test_heads_of_attention_are_none():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.v_head = linear(8)
            self.k_proj = linear(8)

    model = nn.ModuleDict({"layers": nn.ModuleList([Layer()]), "head": Layer(), "value_head": linear(8)})
    pooling = "head.k_proj.weight"  # and a head in it is one, by its name
    assert muon_names(model) == {"layers.0.v_head.weight", "layers.0.k_proj.weight", pooling}


def test_a_row_per_token_is_no_head_where_others_take_it_in():
    model = backbone(vocab_size_of_something=32)
    model.config.other_vocab_size = 48
    model.extra, model.out = linear(32, 24), linear(48, 32)
    assert "extra.weight" in muon_names(model)
    assert "out.weight" in muon_names(model)  # as many as the MLP's hidden size
    model.config.other_vocab_size, model.out = 50, linear(50, 32)
    assert reasons(model)["out.weight"] == "head"


def test_convolutions():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Conv1d(6, 10, 3)
            self.grouped = nn.Conv2d(6, 8, 3, groups=2)
            self.volume = nn.Conv3d(6, 8, 2)
            self.back = nn.ConvTranspose2d(6, 8, 3)
            self.back_grouped = nn.ConvTranspose1d(6, 9, 3, groups=3)
            self.depthwise = nn.Conv2d(6, 12, 3, groups=6)
            self.out = nn.Conv2d(6, 1, 3)
            self.thin = nn.Conv1d(6, 3, 3, groups=3)
            self.point = nn.Conv1d(1, 8, 1)

    with torch.device("meta"):
        model = Layers()
    assert seen(model) == {
        "line.weight": ("flat", "convolution"),
        "grouped.weight": ("flat, rows 2x4", "convolution"),
        "volume.weight": ("flat", "convolution"),
        "back.weight": ("transposed, flat", "convolution"),
        "back_grouped.weight": ("transposed, flat, rows 3x2", "convolution"),
    }
    found = reasons(model)
    assert found["depthwise.weight"] == "depthwise convolution"
    single = "convolution of a single row or column"
    assert {found[f"{name}.weight"] for name in ("out", "thin", "point")} == {single}
    assert seen(model, muon_patterns="depthwise")["depthwise.weight"] == ("flat", "muon_patterns 'depthwise'")


class TestFused:
    """Where tests/golden has no word: options, adapters, and what is not known."""

    def gpt2(self, **options):
        small = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 32}
        return build("GPT2LMHeadModel", "GPT2Config", **small, **options)

    def test_options(self):
        name = "transformer.h.0.attn.c_attn.weight"
        assert seen(self.gpt2())[name] == ("transposed, columns 32+32+32", "hidden matrix: q, k, v")
        assert seen(self.gpt2(), split_fused=False)[name] == ("transposed", "hidden matrix: q, k, v")
        assert seen(self.gpt2(), per_head="true")[name] == ("transposed, columns 12x8", "hidden matrix: q, k, v")
        with pytest.raises(ValueError, match="per_head=true goes head by head, and split_fused=false keeps"):
            seen(self.gpt2(), per_head=True, split_fused=False)

    def test_patterns_keep_the_view(self):
        view, reason = seen(self.gpt2(), muon_patterns="c_attn")["transformer.h.0.attn.c_attn.weight"]
        assert (view, reason) == ("transposed, columns 32+32+32", "muon_patterns 'c_attn'")

    def test_projections_of_code_that_is_not_known_stay_whole(self):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.num_heads, self.head_dim = 2, 4
                self.qkv = linear(24)
                self.gate_up_proj = linear(16)

        assert seen(nn.ModuleDict({"attn": Attention()})) == {
            "attn.qkv.weight": ("", "hidden matrix"),
            "attn.gate_up_proj.weight": ("", "hidden matrix"),
        }

    def test_sizes_that_do_not_make_up_the_weight_leave_it_whole(self):
        model = build("Phi3ForCausalLM", "Phi3Config", **TINY, pad_token_id=0)
        attention = model.model.layers[0].self_attn
        attention.qkv_proj = nn.Linear(32, 65, bias=False, device="meta")
        assert seen(model)["model.layers.0.self_attn.qkv_proj.weight"] == ("", "hidden matrix")
        assert seen(model)["model.layers.1.self_attn.qkv_proj.weight"][0] == "rows 32+16+16"

    def test_heads_of_queries_that_are_not_compressed(self):
        """Where keys are, `head_dim` is that of the rotated part of a query."""
        latent = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
        model = build("DeepseekV2ForCausalLM", "DeepseekV2Config", **TINY, **latent, first_k_dense_replace=2)
        view, _ = seen(model, per_head=True)["model.layers.0.self_attn.q_proj.weight"]
        assert view == "rows 4x10"

    def test_multihead_attention_of_torch(self):
        model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
        assert seen(model)["attn.in_proj_weight"] == ("rows 8+8+8", "hidden matrix: q, k, v")

    def test_wrapped_subclassed_and_adapted_modules(self):
        import peft

        attention = type(self.gpt2().transformer.h[0].attn)
        model = self.gpt2()
        model.transformer.h[0].attn.__class__ = type("FlashAttentionOfMine", (attention,), {})
        view = ("transposed, columns 32+32+32", "hidden matrix: q, k, v")
        assert seen(model)["transformer.h.0.attn.c_attn.weight"] == view
        assert seen(torch.compile(model))["transformer.h.0.attn.c_attn.weight"] == view
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["c_fc"], fan_in_fan_out=True)
        adapted = peft.get_peft_model(self.gpt2(), config)
        adapted.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight.requires_grad_(True)
        found = seen(adapted, lora="muon")
        prefix = "base_model.model.transformer.h.0"
        assert found[f"{prefix}.attn.c_attn.base_layer.weight"] == view
        assert found[f"{prefix}.attn.c_attn.lora_B.default.weight"] == ("", "LoRA factor, lora=muon")
        assert found[f"{prefix}.mlp.c_fc.modules_to_save.default.weight"] == ("transposed", "hidden matrix")
        assert len(found) == 4

    def test_tied_and_frozen_weights(self):
        model = build("Phi3ForCausalLM", "Phi3Config", **TINY, pad_token_id=0, tie_word_embeddings=True)
        model.model.layers[1].mlp.gate_up_proj.weight = model.model.layers[0].mlp.gate_up_proj.weight
        model.model.layers[0].self_attn.qkv_proj.weight.requires_grad_(False)
        found = seen(model)
        assert found["model.layers.0.mlp.gate_up_proj.weight"][0] == "rows 48+48"
        assert "model.layers.1.mlp.gate_up_proj.weight" not in found
        assert "model.layers.0.self_attn.qkv_proj.weight" not in found
        assert "model.layers.1.self_attn.qkv_proj.weight" in found


def test_frozen_parameters_have_no_route():
    model = qwen3()
    model.model.layers[0].requires_grad_(False)
    assert muon_names(model) == {name.replace(".0.", ".1.") for name in layers(*ATTENTION, *MLP, count=1)}


class TestLora:
    @pytest.fixture
    def model(self):
        import peft

        base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, head_dim=8))
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"]))

    def test_factors_go_to_adamw(self, model):
        assert muon_names(model) == set()
        assert "name contains 'lora' (lora=muon opts in)" in reasons(model).values()

    def test_opting_in(self, model):
        routed = muon_names(model, lora="muon")
        assert len(routed) == 8
        assert all("q_proj.lora_" in name or "v_proj.lora_" in name for name in routed)

    def test_modules_to_save(self):
        import peft

        base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, head_dim=8))
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
        found = reasons(peft.get_peft_model(base, config), lora="muon")
        assert any("lm_head" in name for name in found)

    @pytest.mark.parametrize("model_class", ["Qwen3ForSequenceClassification", "LlamaForSequenceClassification"])
    def test_label_head_inside_peft(self, model_class):
        import peft

        config = getattr(transformers, model_class.replace("ForSequenceClassification", "Config"))(**TINY, num_labels=5)
        config.pad_token_id = 0
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"])
        model = peft.get_peft_model(getattr(transformers, model_class)(config), lora)
        assert muon_names(model) == set()
        assert any("score" in name and reason == "head" for name, reason in reasons(model).items())

    def test_other_adapters(self):
        import peft

        base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, head_dim=8))
        model = peft.get_peft_model(base, peft.LoHaConfig(r=4, target_modules=["q_proj"]))
        assert muon_names(model) == set()
        assert "adapter factor (muon_patterns opts in)" in reasons(model).values()


class TestPatterns:
    def test_override_both_ways(self):
        routed = muon_names(qwen3(), muon_patterns="lm_head", adamw_patterns="k_proj|v_proj")
        kept = [name for name in ATTENTION if "k_proj" not in name and "v_proj" not in name]
        assert routed == layers(*kept, *MLP) | {"lm_head.weight"}

    def test_adamw_patterns_win(self):
        assert muon_names(qwen3(), muon_patterns="proj", adamw_patterns="proj") == set()

    def test_muon_patterns_leave_vectors_alone(self):
        assert muon_names(qwen3(), muon_patterns="layers") == layers(*ATTENTION, *MLP)

    def test_flags_hold_for_every_alternative(self):
        expected = layers(*MLP, "self_attn.o_proj.weight", "self_attn.v_proj.weight")
        assert muon_names(qwen3(), adamw_patterns="(?i)Q_PROJ|K_PROJ") == expected

    def test_pattern_of_frozen_parameters(self):
        model = qwen3()
        model.lm_head.requires_grad_(False)
        with pytest.raises(ValueError, match=r"'lm_head' matches no trained parameter, only lm_head"):
            route_parameters(model, adamw_patterns="lm_head")

    def test_reasons_name_the_pattern(self):
        routes = {
            route.name: route for route in route_parameters(qwen3(), muon_patterns="lm_head", adamw_patterns="k_")
        }
        assert routes["lm_head.weight"].reason == "muon_patterns 'lm_head'"
        assert routes["model.layers.0.self_attn.k_proj.weight"].reason == "adamw_patterns 'k_'"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"adamw_patterns": "router|gate"}, "adamw_patterns: 'router' matches no parameter. Names look like model"),
            ({"muon_patterns": "k_proj|nothing"}, "muon_patterns: 'nothing' matches no parameter"),
            ({"muon_patterns": "norm"}, "muon_patterns: 'norm' matches no matrix, only model.layers.0"),
            ({"lora": "muon"}, "lora=muon: no LoRA factor is trained"),
            ({"adamw_patterns": "(q|z"}, "is not a regular expression"),
            ({"adamw_patterns": "q_proj||k_proj"}, "empty alternative"),
            ({"optim_target_modules": "nowhere"}, "optim_target_modules='nowhere' matches no module"),
            ({"optim_target_modules": ["nowhere"]}, "matches no module. Names look like model"),
        ],
    )
    def test_mistakes(self, options, message):
        with pytest.raises(ValueError, match=message):
            route_parameters(qwen3(), **options)

    def test_alternatives_inside_brackets_stay_together(self):
        assert muon_names(qwen3(), adamw_patterns="(q|k)_proj|[v|]_proj|mlp") == layers("self_attn.o_proj.weight")
        with pytest.raises(ValueError, match=r"'\(z\|y\)_proj' matches no parameter"):
            route_parameters(qwen3(), adamw_patterns="(z|y)_proj|q_proj")

    @pytest.mark.parametrize(
        ("targets", "expected"),
        [
            (["mlp"], MLP),
            (["q_proj", "up_proj"], ["self_attn.q_proj.weight", "mlp.up_proj.weight"]),
            (r".*\.self_attn\..*", ATTENTION),
            ([r".*\.self_attn\.[qk]_proj"], ["self_attn.q_proj.weight", "self_attn.k_proj.weight"]),
            ("all-linear", [*ATTENTION, *MLP]),
        ],
    )
    def test_target_modules_mean_what_transformers_says(self, targets, expected):
        from transformers.trainer_utils import check_target_module_exists

        model = qwen3()
        assert muon_names(model, optim_target_modules=targets) == layers(*expected)
        if targets != "all-linear":
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and "lm_head" not in name:
                    inside = f"{name}.weight" in muon_names(model, optim_target_modules=targets)
                    assert inside == bool(check_target_module_exists(targets, name))


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
