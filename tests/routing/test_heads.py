"""Output heads, recognized by name, rows and readers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from tests.routing.models import TINY, backbone, build, linear, muon_names, reasons


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
        adamw_reasons = reasons(transformers.FSMTForConditionalGeneration(config))
    assert adamw_reasons["model.decoder.output_projection.weight"] == "head"


def test_heads_of_attention_are_none():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.v_head = linear(8)
            self.k_proj = linear(8)

    model = nn.ModuleDict({"layers": nn.ModuleList([Layer()]), "head": Layer(), "value_head": linear(8)})
    pooling = "head.k_proj.weight"  # the pooling head's own v_head is a head, by its name
    assert muon_names(model) == {"layers.0.v_head.weight", "layers.0.k_proj.weight", pooling}


def test_a_row_per_token_is_no_head_where_others_take_it_in():
    model = backbone(vocab_size_of_something=32)
    model.config.other_vocab_size = 48
    model.extra, model.out = linear(32, 24), linear(48, 32)
    assert "extra.weight" in muon_names(model)
    assert "out.weight" in muon_names(model)  # as many rows as the MLP's hidden size
    model.config.other_vocab_size, model.out = 50, linear(50, 32)
    assert reasons(model)["out.weight"] == "head"
