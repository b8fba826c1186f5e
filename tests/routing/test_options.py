"""The options of routing: lora, muon_patterns and adamw_patterns."""

from __future__ import annotations

import peft
import pytest
import transformers
from torch import nn

from hf_muon import route_parameters
from tests.routing.models import ATTENTION, MLP, OUTSIDE, TINY, layers, linear, muon_names, qwen3, reasons


def test_names_that_only_look_like_lora():
    model = nn.ModuleDict({"floral": linear(8), "exploration": linear(8)})
    assert muon_names(model) == {"floral.weight", "exploration.weight"}


def adapted(base=None, **options):
    """Return a small model with LoRA, on one projection unless options say otherwise."""
    base = base or transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, head_dim=8))
    return peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options}))


class TestLora:
    @pytest.fixture
    def model(self):
        return adapted(target_modules=["q_proj", "v_proj", "embed_tokens"])

    def test_opting_in(self, model):
        routed = muon_names(model, lora="muon")
        assert len(routed) == 8
        assert all("q_proj.lora_" in name or "v_proj.lora_" in name for name in routed)

    def test_a_rank_that_equals_a_size_in_the_configuration(self):
        """Route factors alike at a rank of 2, the usual number of labels, of 64, the vocabulary, and of neither."""
        labels, vocabulary, other = (
            muon_names(adapted(r=r, target_modules=["q_proj", "v_proj"]), lora="muon") for r in (2, 64, 4)
        )
        assert labels == vocabulary == other
        assert len(other) == 8

    def test_one_factor_of_two(self, model):
        both, one = (muon_names(model, lora="muon", adamw_patterns=patterns) for patterns in (None, "lora_A"))
        assert one == {name for name in both if "lora_B" in name}
        assert len(one) == 4

    @pytest.mark.parametrize("family", ["Qwen3", "Llama"])
    def test_label_head_inside_peft(self, family):
        config = getattr(transformers, f"{family}Config")(**TINY, num_labels=5, pad_token_id=0)
        base = getattr(transformers, f"{family}ForSequenceClassification")(config)
        model = adapted(base=base, task_type="SEQ_CLS")
        assert muon_names(model) == set()
        assert any("score" in name and reason == OUTSIDE for name, reason in reasons(model).items())


class TestPatterns:
    def test_override_both_ways(self):
        routed = muon_names(qwen3(), muon_patterns="lm_head", adamw_patterns="k_proj|v_proj")
        attention = [name for name in ATTENTION if "k_proj" not in name and "v_proj" not in name]
        assert routed == layers(*attention, *MLP) | {"lm_head.weight"}

    def test_adamw_patterns_win(self):
        assert muon_names(qwen3(), muon_patterns="proj", adamw_patterns="proj") == set()

    def test_muon_patterns_leave_vectors_alone(self):
        assert muon_names(qwen3(), muon_patterns="layers") == layers(*ATTENTION, *MLP)

    def test_flags_hold_for_every_alternative(self):
        expected = layers(*MLP, "self_attn.o_proj.weight", "self_attn.v_proj.weight")
        assert muon_names(qwen3(), adamw_patterns="(?i)Q_PROJ|K_PROJ") == expected

    def test_reasons_name_the_pattern(self):
        routes = {
            route.name: route for route in route_parameters(qwen3(), muon_patterns="lm_head", adamw_patterns="k_")
        }
        assert routes["lm_head.weight"].reason == "muon_patterns 'lm_head'"
        assert routes["model.layers.0.self_attn.k_proj.weight"].reason == "adamw_patterns 'k_'"

    def test_alternatives_inside_brackets_stay_together(self):
        assert muon_names(qwen3(), adamw_patterns="(q|k)_proj|[v|]_proj|mlp") == layers("self_attn.o_proj.weight")
