"""The parts of fused gates and attentions in modules outside text models are the named ones.

As in tests/routing/test_fused.py, zeros in one part silence the other parts, and nothing else does.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import sigmoid, tanh

from hf_muon import route_parameters
from tests.routing.test_fused import fused

# The part whose zeros silence the others. A sigmoid gate of zeros passes half of the value, so there it is the value.
SILENT = {
    "value, gate": "value",
    "gate, up": "gate",
    "up, gate": "gate",
    "q, k, v": "v",
    "k, v": "v",
    "q, context, gates": "q",
}

TOKENS = (2, 6, 16)
CHANNELS = (2, 16, 6)
CONFORMER = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "conv_depthwise_kernel_size": 3,
    "hidden_act": "silu",
    "conformer_conv_dropout": 0.0,
}
SEAMLESS = {
    "hidden_size": 16,
    "speech_encoder_attention_heads": 2,
    "speech_encoder_intermediate_size": 16,
    "adaptor_kernel_size": 2,
    "adaptor_stride": 2,
    "adaptor_dropout": 0.0,
}
LEVIT = {"key_dim": 4, "num_attention_heads": 2, "attention_ratio": 3}

# A module of transformers, the class, its configuration's class and options or its arguments, and shapes of inputs.
MODULES = [
    ("moonshine", "MoonshineDecoderMLP", "MoonshineConfig", {"hidden_size": 16}, {"hidden_act": "silu"}, [TOKENS]),
    (
        "kyutai_speech_to_text",
        "KyutaiSpeechToTextGatingMLP",
        "KyutaiSpeechToTextConfig",
        {"hidden_size": 16, "ffn_dim": 24},
        {},
        [TOKENS],
    ),
    ("clvp", "ClvpEncoderMLP", "ClvpEncoderConfig", {"hidden_size": 16, "intermediate_size": 24}, {}, [TOKENS]),
    ("wav2vec2_conformer", "Wav2Vec2ConformerConvolutionModule", "Wav2Vec2ConformerConfig", CONFORMER, {}, [TOKENS]),
    ("wav2vec2_bert", "Wav2Vec2BertConvolutionModule", "Wav2Vec2BertConfig", CONFORMER, {}, [TOKENS]),
    ("seamless_m4t", "SeamlessM4TConformerAdapterLayer", "SeamlessM4TConfig", SEAMLESS, {}, [TOKENS]),
    (
        "gemma3n",
        "Gemma3nAudioConformerLightConv1d",
        "Gemma3nAudioConfig",
        {"hidden_size": 16, "conf_conv_kernel_size": 3},
        {},
        [TOKENS],
    ),
    (
        "granite_speech",
        "GraniteSpeechConformerConvModule",
        "GraniteSpeechEncoderConfig",
        {"hidden_dim": 16, "conv_kernel_size": 3},
        {},
        [TOKENS],
    ),
    (
        "phi4_multimodal",
        "Phi4MultimodalAudioGluPointWiseConv",
        "Phi4MultimodalAudioConfig",
        {"hidden_size": 16, "ext_pw_out_channel": 12},
        {},
        [TOKENS],
    ),
    (
        "speech_to_text",
        "Conv1dSubsampler",
        "Speech2TextConfig",
        {"input_feat_per_channel": 16, "conv_channels": 20, "d_model": 8},
        {},
        [(2, 9, 16)],
    ),
    ("levit", "LevitAttention", None, {}, {"hidden_sizes": 16, "resolution": 2, **LEVIT}, [(2, 4, 16)]),
    (
        "levit",
        "LevitAttentionSubsample",
        None,
        {},
        {"input_dim": 16, "output_dim": 20, "stride": 2, "resolution_in": 3, "resolution_out": 2, **LEVIT},
        [(2, 9, 16)],
    ),
    (
        "focalnet",
        "FocalNetModulation",
        "FocalNetConfig",
        {"normalize_modulator": False},
        {"index": 0, "dim": 16},
        [(2, 4, 4, 16)],
    ),
    ("vits", "VitsWaveNet", "VitsConfig", {"hidden_size": 16}, {"num_layers": 1}, [CHANNELS, (1,)]),
]


def build_case(case):
    module, name, config_class, options, arguments, shapes = case
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = []
    if config_class is not None:
        config = [getattr(importlib.import_module(f"transformers.models.{module}"), config_class)(**options)]
    torch.manual_seed(0)
    model = getattr(code, name)(*config, **arguments)
    model.eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = [torch.randn(shape) for shape in shapes]
    return model, inputs


@torch.no_grad()
@pytest.mark.parametrize("case", MODULES, ids=lambda case: case[1])
def test_a_part_of_zeros_silences_the_others(case):
    kinds = {names for _, names, _ in fused(build_case(case)[0])}
    assert kinds
    assert kinds <= SILENT.keys()
    for silent in (False, True):
        model, inputs = build_case(case)
        weights = list(fused(model))
        for name, names, parts in weights:
            if silent:
                rows = parts[SILENT[names]]
                if "parametrizations" in name:  # under a weight norm, zero the magnitudes: a direction cannot be zero
                    rows = model.get_parameter(name.replace("original1", "original0"))[: len(rows)]
                rows.zero_()
                owner, _, leaf = name.replace(".parametrizations.weight.original1", ".weight").rpartition(".")
                assert leaf == "weight"
                bias = getattr(model.get_submodule(owner), "bias", None)
                if bias is not None:
                    bias.zero_()
        if silent and hasattr(model, "b1"):
            model.b1.zero_()
        for module in model.modules():
            if silent and isinstance(module, nn.BatchNorm1d) and "Levit" in case[1]:
                module.bias.zero_()
        before = model(*inputs)
        for _, names, parts in weights:
            for part, values in parts.items():
                if part != SILENT[names]:
                    values.normal_()
        assert torch.allclose(before, model(*inputs), rtol=0, atol=1e-5) == silent


@torch.no_grad()
def test_the_gates_of_an_lstm():
    torch.manual_seed(0)
    model = nn.LSTM(5, 4)
    (x, h, c), parts = (torch.randn(1, n) for n in (5, 4, 4)), {}
    for name, names, weights in fused(model):
        assert names == "input, forget, cell, output"
        bias = getattr(model, name.replace("weight", "bias")).split(4)
        read = x if "_ih_" in name else h
        for (part, weight), b in zip(weights.items(), bias, strict=True):
            parts[part] = parts.get(part, 0) + read @ weight.T + b
    after = sigmoid(parts["forget"]) * c + sigmoid(parts["input"]) * tanh(parts["cell"])
    output, _ = model(x[None], (h[None], c[None]))
    assert torch.allclose(output[0], sigmoid(parts["output"]) * tanh(after), atol=1e-6)


@torch.no_grad()
def test_the_gates_of_a_gru():
    torch.manual_seed(0)
    model = nn.GRUCell(5, 4)
    x, h = torch.randn(1, 5), torch.randn(1, 4)
    sums = {}
    for name, names, weights in fused(model):
        assert names == "reset, update, new"
        bias = getattr(model, name.replace("weight", "bias")).split(4)
        for (part, weight), b in zip(weights.items(), bias, strict=True):
            sums[name[-2:], part] = (x if name.endswith("ih") else h) @ weight.T + b
    reset, update = (sigmoid(sums["ih", part] + sums["hh", part]) for part in ("reset", "update"))
    new = tanh(sums["ih", "new"] + reset * sums["hh", "new"])
    assert torch.allclose(model(x, h), (1 - update) * new + update * h, atol=1e-6)


def test_layouts_of_one_matrix_with_more_dims():
    """Check Funnel's position kernel, (in, heads x size), and Moshi's linear layer, one matrix for each codebook."""
    funnel = importlib.import_module("transformers.models.funnel.modeling_funnel")
    code = importlib.import_module("transformers.models.kyutai_speech_to_text.modeling_kyutai_speech_to_text")
    with torch.device("meta"):
        attention = funnel.FunnelRelMultiheadAttention(
            SimpleNamespace(**funnel.FunnelConfig(d_model=16, n_head=2, d_head=6).to_dict()), 0
        )
        stack = code.KyutaiSpeechToTextFlexibleLinear(8, 12, 3)
    views = {route.name: (route.use_muon, route.view) for route in route_parameters(attention)}
    assert views["r_kernel"] == (True, "transposed, flat")
    assert {(route.use_muon, route.view) for route in route_parameters(nn.ModuleDict({"fc": stack}))} == {(True, "")}
