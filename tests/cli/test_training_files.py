"""`hf-muon inspect` and `plan` of training files, quantized checkpoints, and models with code of their own."""

from __future__ import annotations

import json

import pytest
import transformers
import yaml
from accelerate.state import PartialState
from transformers import Qwen3Config
from typer.testing import CliRunner

from hf_muon.cli.app import app
from hf_muon.routing.model_facts import text_config_of
from tests.cli.calls import call
from tests.refusals import codes_in

ZERO3 = {"zero_optimization": {"stage": 3}}
QUANTIZED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the configuration of a small Qwen3, without weights."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    folder = tmp_path_factory.mktemp("small")
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def quantized(folder, tmp_path):
    """Return a folder with the same configuration, quantized."""
    config = json.loads((folder / "config.json").read_text())
    path = tmp_path / "quantized"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZED}))
    return path


def write(tmp_path, folder, **keys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": str(folder), "optim": "muon", **keys}))
    return path


# --- what a table does not show


def test_a_checkpoint_that_a_run_may_dequantize(quantized, folder, tmp_path):
    expected = json.loads(call("inspect", folder, "--json").stdout)["muon"]
    for source in (quantized, write(tmp_path, quantized)):
        report = json.loads(call("inspect", source, "--json").stdout)
        assert report["muon"] == expected
        assert any("the checkpoint is quantized, and this table is" in note for note in report["notes"])
    lora = {"finetuning_type": "lora", "optim_args": "lora=muon"}
    report = json.loads(call("inspect", write(tmp_path, quantized, **lora), "--json").stdout)
    assert (report["muon"]["parameters"], report["notes"]) == (2 * 2 * 7, [])


@pytest.mark.parametrize("name", ["Musicgen", "MusicgenMelody"])
def test_a_model_with_two_text_configurations(tmp_path, name):
    """Read a model with a text encoder and a decoder, between which transformers does not choose."""
    text = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 2}
    decoder = {"vocab_size": 60, "hidden_size": 16, "ffn_dim": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio = {"model_type": "encodec", "num_filters": 4, "hidden_size": 16, "codebook_size": 8}
    parts = {"text_encoder": {"model_type": "t5", **text}, "audio_encoder": audio, "decoder": decoder}
    config = getattr(transformers, f"{name}Config")(**parts, architectures=[f"{name}ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    result = call("inspect", tmp_path, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["muon"]["weights"] > 0
    result = call("plan", tmp_path, "--layout", "fsdp", "--ranks", 2)
    assert result.exit_code == 0, result.stderr
    assert text_config_of(config) is config.decoder


# --- training files


class TestTrainingFiles:
    def test_what_is_of_another_optimizer_or_of_another_program_is_ignored(self, folder, tmp_path, monkeypatch):
        galore = {"optim": "galore_adamw", "optim_target_modules": ["mlp"], "optim_args": "rank=8"}
        assert call("inspect", write(tmp_path, folder, **galore)).exit_code == 0
        monkeypatch.setenv("USE_MCA", "1")  # LLaMA-Factory's
        assert call("inspect", write(tmp_path, folder)).exit_code == 0

    def test_the_table_stands_above_the_reasons(self, folder, tmp_path):
        result = call("inspect", write(tmp_path, folder, use_muon=True))
        assert "mlp.up_proj.weight " in result.stdout
        assert result.stderr.count("\n  - ") == 1

    def test_of_another_optimizer_it_is_a_note(self, folder, tmp_path):
        result = call("inspect", write(tmp_path, folder, optim="adamw_torch", use_muon=True, optim_args="rank=8"))
        assert result.exit_code == 0, result.stderr
        assert "[rival-optimizer]" in result.stdout

    @pytest.mark.parametrize(
        "keys",
        [
            {"deepspeed": ZERO3},
            {"deepspeed": {**ZERO3, "optimizer": {}}, "optim": None},
            {"fsdp": True, "fsdp_config": {"version": 2}},
            {"parallelism_config": {"sp_size": 2}, "deepspeed": ZERO3},
            {"bf16": True, "tf32": True, "learning_rate": "1e-5", "learning_rate_of_mine": 3, "report_to": "wandb"},
        ],
    )
    def test_not_refused(self, folder, tmp_path, monkeypatch, keys):
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        state = dict(PartialState._shared_state)
        result = call("inspect", write(tmp_path, folder, **keys))
        assert result.exit_code == 0, result.stderr
        assert PartialState._shared_state == state


# --- remote code


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


class TestRemoteCode:
    @pytest.fixture
    def remote(self, tmp_path, monkeypatch):
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
        folder = tmp_path / "remote"
        folder.mkdir()
        (folder / "net.py").write_text(REMOTE)
        own = {"AutoConfig": "net.NetConfig", "AutoModelForCausalLM": "net.Net"}
        config = {"model_type": "net_of_mine", "architectures": ["Net"], "auto_map": own}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    @pytest.mark.parametrize("command", ["inspect", "plan"])
    def test_nothing_is_asked_or_run_without_the_option(self, remote, command):
        (remote / "net.py").write_text("raise SystemExit('it has run')")
        result = CliRunner().invoke(app, [command, str(remote)], input="y\n")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "--trust-remote-code" in result.stderr
        assert codes_in(result.stderr) == {"unbuildable-model"}

    def test_with_the_option(self, remote):
        result = call("inspect", remote, "--trust-remote-code", "--json")
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert (report["model"], report["muon"]) == ("Net", {"parameters": 1, "weights": 24})
