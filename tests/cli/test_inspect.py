"""`hf-muon inspect` on checkpoints, training files, adapters, model cards, and models with code of their own."""

from __future__ import annotations

import json

import pytest
import transformers
import yaml
from accelerate.state import PartialState
from transformers import Qwen3ForCausalLM

from hf_muon import MuonConfig, route_parameters
from hf_muon.cli.model_source import known_configs, model_from, read_source
from hf_muon.integrations.names import TAKEN, TRANSFORMERS
from hf_muon.routing.model_facts import text_config_of
from tests.cli.calls import call, report_of, training_yaml, transcript
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
    runs = {
        "lora": {"use_peft": True, "lora_modules_to_save": ["lm_head"]},
        "script": {"learning_rate_of_mine": 1e-5},
        "llamafactory": {"finetuning_type": "full"},
        "adamw": {"optim": "adamw_torch"},
        "patterns": {"optim_args": "adamw_patterns=up_proj"},
    }
    sources = [
        [model],
        [model, "--all"],
        [tied],
        [config_json(tmp_path / "experts", model_type="gpt_oss", **experts)],
        *([training_yaml(tmp_path, model, f"{name}.yaml", **keys)] for name, keys in runs.items()),
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


def test_options_of_the_run_and_of_the_command_line(small, tmp_path):
    path = str(training_yaml(tmp_path, small[1], optim_args="adamw_patterns=up_proj", learning_rate="2e-5"))
    assert read_source(path).config == MuonConfig(lr=2e-5, adamw_patterns="up_proj")
    assert read_source(path, "adamw_patterns=down_proj").config.adamw_patterns == "down_proj"
    v1 = tmp_path / "v1.yaml"
    run = {"model": str(small[1]), "optim_config": {"name": "muon", "weight_decay": 0.1, "momentum": 0.9}}
    v1.write_text(yaml.safe_dump(run))
    source = read_source(str(v1))
    assert (source.config.weight_decay, source.config.momentum) == (0.1, 0.9)


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


def test_a_training_file_of_json(small, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"model_name_or_path": str(small[1]), "optim": "muon"}))
    assert report_of("inspect", tmp_path / "run.json")["muon"] == report_of("inspect", small[1])["muon"]


def test_a_name_on_modelscope(tmp_path, monkeypatch):
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    result = call("inspect", training_yaml(tmp_path, "someone/model", finetuning_type="full"))
    assert "ModelScope" in result.stderr
    assert codes_in(result.stderr) == {"not-on-hub"}


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
    expected = report_of("inspect", small[1])["muon"]
    for source in (folder, training_yaml(tmp_path, folder)):
        report = report_of("inspect", source)
        assert report["muon"] == expected
        assert any("the checkpoint is quantized, and this table is" in note for note in report["notes"])
    lora = training_yaml(tmp_path, folder, use_peft=True, optim_args="lora=muon")
    report = report_of("inspect", lora)
    assert (report["muon"]["parameters"], report["notes"]) == (2 * 6 * 2, ["read as a file of trl sft"])


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


ZERO3 = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    "keys",
    [
        {"deepspeed": ZERO3},
        {"deepspeed": {**ZERO3, "optimizer": {}}, "optim": None},
        {"fsdp": True, "fsdp_config": {"version": 2}},
        {"parallelism_config": {"sp_size": 2}, "deepspeed": ZERO3},
        {"bf16": True, "tf32": True, "learning_rate": "1e-5", "learning_rate_of_mine": 3, "report_to": "wandb"},
        {"optim": "galore_adamw", "optim_target_modules": ["mlp"], "optim_args": "rank=8"},
    ],
)
def test_what_a_run_of_several_ranks_or_of_another_optimizer_has_is_not_refused(small, tmp_path, monkeypatch, keys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "USE_MCA": "1"}.items():
        monkeypatch.setenv(name, value)
    state = dict(PartialState._shared_state)
    result = call("inspect", training_yaml(tmp_path, small[1], **keys))
    assert result.exit_code == 0, result.stderr
    assert PartialState._shared_state == state


def test_the_verdict_on_a_run_that_is_not_refused(small, tmp_path):
    """Say it of a run of Muon, not of a model alone, of another optimizer's run, or where nothing reaches Muon."""
    verdict = "hf_muon would not refuse this run.\n"
    assert call("inspect", training_yaml(tmp_path, small[1])).stdout.endswith(verdict)
    others = [training_yaml(tmp_path, small[1], "a.yaml", optim="adamw_torch"), small[1]]
    others += [training_yaml(tmp_path, small[1], "b.yaml", use_peft=True)]
    assert not any(verdict in call("inspect", other).stdout for other in others)


def test_a_muon_of_the_programs_own_is_not_taken_for_this_package(small, tmp_path, monkeypatch):
    monkeypatch.setitem(TAKEN, TRANSFORMERS, True)
    result = call("inspect", training_yaml(tmp_path, small[1]))
    assert "says optim: muon, which is its program's own: this is what optim: hf_muon would do" in " ".join(
        result.stdout.split()
    )
    verdict = "hf_muon would not refuse this run.\n"
    assert not result.stdout.endswith(verdict)
    assert call("inspect", training_yaml(tmp_path, small[1], optim="hf_muon")).stdout.endswith(verdict)


def test_the_table_stands_above_the_reasons_and_of_another_optimizer_they_are_notes(small, tmp_path):
    result = call("inspect", training_yaml(tmp_path, small[1], use_muon=True))
    assert "mlp.up_proj.weight " in result.stdout
    assert result.stderr.count("\n  - ") == 1
    other = training_yaml(tmp_path, small[1], optim="adamw_torch", use_muon=True, optim_args="rank=8")
    result = call("inspect", other)
    assert result.exit_code == 0, result.stderr
    assert "[rival-optimizer]" in result.stdout


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
