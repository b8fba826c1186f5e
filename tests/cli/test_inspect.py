"""`hf-muon inspect` on checkpoints, model cards, and models with code of their own; of runs see test_dry_run.py."""

from __future__ import annotations

import json

import pytest
import transformers
from transformers import Qwen3ForCausalLM

from hf_muon import route_parameters
from hf_muon.cli.model_source import known_configs, model_from
from hf_muon.routing.model_facts import text_config_of
from tests.cli.calls import call, report_of, transcript
from tests.refusals import codes_in

WEIGHTS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "deepseek-v3": 671_026_404_352,
}
"""Of published models."""


def config_json(folder, **content):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.promise("inspect")
def test_json_has_the_routes_of_the_model(small):
    model, folder = small
    report = report_of("inspect", folder)
    routes = route_parameters(model)
    assert [tuple(p[k] for k in ("name", "shape", "route", "reason", "view")) for p in report["parameters"]] == [
        (r.name, list(r.shape), "muon" if r.use_muon else "adamw", r.reason, r.view) for r in routes
    ]
    for half, use_muon in (("muon", True), ("adamw", False)):
        mine = [r.parameter.numel() for r in routes if r.use_muon is use_muon]
        assert report[half] == {"parameters": len(mine), "weights": sum(mine)}
    assert report["tied"] == {}
    again = report_of("inspect", folder / "config.json")
    assert {**again, "source": report["source"]} == report


def test_what_is_shown(small, tmp_path, golden):
    """Show tables, with what is tied, frozen and seen as parts; and that nothing reaches Muon, which is an error."""
    model = small[1]
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2}
    tied = config_json(tmp_path / "tied", model_type="qwen3", **sizes, tie_word_embeddings=True)
    experts = {**sizes, "intermediate_size": 24, "num_local_experts": 4}
    sources = [
        [model],
        [model, "--all"],
        [tied],
        [config_json(tmp_path / "experts", model_type="gpt_oss", **experts)],
        [model, "--optim-args", "adamw_patterns=up_proj"],
    ]
    text = transcript(*(["inspect", *words] for words in sources))
    golden("cli/inspect", text, MODEL=model, FOLDER=tmp_path)
    assert report_of("inspect", tied)["tied"] == {"model.embed_tokens.weight": ["lm_head.weight"]}


@pytest.mark.parametrize("read", [lambda t: t.sum().item(), lambda t: bool(t.any()), lambda t: t.tolist()])
def test_a_constructor_that_reads_weights_allocates_nothing(small, monkeypatch, read):
    built, plain = [], Qwen3ForCausalLM.__init__

    def reads(self, config):
        plain(self, config)
        built.extend(self.parameters())
        read(self.lm_head.weight)

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", reads)
    with pytest.raises(ValueError, match=r"its constructor computes with weights, .*hf_muon.route_parameters"):
        model_from(small[1])
    assert built
    assert all(param.is_meta for param in built)


@pytest.mark.parametrize(
    ("kind", "model_class"),
    [("t5", "T5ForConditionalGeneration"), ("whisper", "WhisperForConditionalGeneration"), ("vit", "ViTModel")],
)
def test_a_configuration_that_names_no_class(tmp_path, kind, model_class):
    model = model_from(config_json(tmp_path, model_type=kind))
    assert type(model).__name__ == model_class
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize(
    ("named", "made"),
    [
        ("Qwen3Model", "Qwen3Model"),
        ("enable_full_determinism", "Qwen3ForCausalLM"),
        ("HfArgumentParser", "Qwen3ForCausalLM"),
    ],
)
def test_the_class_that_a_configuration_names_is_a_model(tmp_path, named, made):
    folder = config_json(tmp_path, model_type="qwen3", num_hidden_layers=1, architectures=[named])
    assert type(model_from(folder)).__name__ == made


def test_cards_have_as_many_weights_as_the_published_models():
    found = {}
    for card in known_configs():
        params = list(model_from(card).parameters())
        assert all(param.is_meta for param in params), card
        found[card] = sum(param.numel() for param in params)
    assert {card: found[card] for card in WEIGHTS} == WEIGHTS


def test_a_checkpoint_that_a_run_may_dequantize(small, tmp_path):
    config = json.loads((small[1] / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = config_json(tmp_path / "quantized", **config, quantization_config=quantized)
    report = report_of("inspect", folder)
    assert report["muon"] == report_of("inspect", small[1])["muon"]
    assert any("the checkpoint is quantized, and this table is" in note for note in report["notes"])


@pytest.mark.parametrize("name", ["Musicgen", "MusicgenMelody"])
def test_a_model_with_two_text_configurations(tmp_path, name):
    """Read a model with a text encoder and a decoder, between which transformers does not choose."""
    text = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 2}
    decoder = {"vocab_size": 60, "hidden_size": 16, "ffn_dim": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio = {"model_type": "encodec", "num_filters": 4, "hidden_size": 16, "codebook_size": 8}
    parts = {"text_encoder": {"model_type": "t5", **text}, "audio_encoder": audio, "decoder": decoder}
    config = getattr(transformers, f"{name}Config")(**parts, architectures=[f"{name}ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    assert report_of("inspect", tmp_path)["muon"]["weights"] > 0
    assert report_of("plan", tmp_path, "--layout", "fsdp", "--ranks", 2)
    assert text_config_of(config) is config.decoder


REMOTE = """
from transformers import PretrainedConfig, PreTrainedModel
from torch import nn

class NetConfig(PretrainedConfig):
    model_type = "net_of_mine"

class Net(PreTrainedModel):
    config_class = NetConfig
    def __init__(self, config):
        super().__init__(config)
        self.inner = nn.Linear(6, 4)
        self.post_init()
"""


def test_remote_code_runs_with_the_option_alone_and_nothing_is_asked(tmp_path, monkeypatch):
    """Answer yes to each question, in case there is one."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    own = {"AutoConfig": "net.NetConfig", "AutoModelForCausalLM": "net.Net"}
    folder = config_json(tmp_path / "remote", model_type="net_of_mine", architectures=["Net"], auto_map=own)
    (folder / "net.py").write_text("raise SystemExit('it has run')")
    for command in ("inspect", "plan"):
        result = call(command, folder)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "--trust-remote-code" in result.stderr
        assert codes_in(result.stderr) == {"unbuildable-model"}
    (folder / "net.py").write_text(REMOTE)
    report = report_of("inspect", folder, "--trust-remote-code")
    assert (report["model"], report["muon"]) == ("Net", {"parameters": 1, "weights": 24})
    config_json(folder, model_type="net_of_mine", architectures=["Qwen3ForCausalLM"], auto_map=own)
    assert report_of("inspect", folder, "--trust-remote-code")["model"] == "Net"
