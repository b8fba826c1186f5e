"""The views of convolutions and fused weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.routing.models import TINY, build, linear, muon_views, reasons

pytestmark = pytest.mark.newest


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


class TestFused:
    """Cases without a table in tests/golden: options, adapters, and unknown code."""

    def gpt2(self, **options):
        small = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 32}
        return build("GPT2LMHeadModel", "GPT2Config", **small, **options)

    def test_options(self):
        name = "transformer.h.0.attn.c_attn.weight"
        assert muon_views(self.gpt2())[name] == ("transposed, columns 32+32+32", "hidden matrix: q, k, v")
        assert muon_views(self.gpt2(), per_head="true")[name] == ("transposed, columns 12x8", "hidden matrix: q, k, v")

    def test_patterns_keep_the_view(self):
        view, reason = muon_views(self.gpt2(), muon_patterns="c_attn")["transformer.h.0.attn.c_attn.weight"]
        assert (view, reason) == ("transposed, columns 32+32+32", "muon_patterns 'c_attn'")

    def test_projections_of_code_that_is_not_known_stay_whole(self):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.num_heads, self.head_dim = 2, 4
                self.qkv = linear(24)
                self.gate_up_proj = linear(16)

        assert muon_views(nn.ModuleDict({"attn": Attention()})) == {
            "attn.qkv.weight": ("", "hidden matrix"),
            "attn.gate_up_proj.weight": ("", "hidden matrix"),
        }

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

    def test_multihead_attention_of_torch(self):
        model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
        assert muon_views(model)["attn.in_proj_weight"] == ("rows 8+8+8", "hidden matrix: q, k, v")

    def test_wrapped_subclassed_and_adapted_modules(self):
        import peft

        attention = type(self.gpt2().transformer.h[0].attn)
        model = self.gpt2()
        model.transformer.h[0].attn.__class__ = type("FlashAttentionOfMine", (attention,), {})
        view = ("transposed, columns 32+32+32", "hidden matrix: q, k, v")
        assert muon_views(model)["transformer.h.0.attn.c_attn.weight"] == view
        assert muon_views(torch.compile(model))["transformer.h.0.attn.c_attn.weight"] == view
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["c_fc"], fan_in_fan_out=True)
        adapted = peft.get_peft_model(self.gpt2(), config)
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
