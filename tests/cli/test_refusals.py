"""`hf-muon inspect` and `plan` of runs that `optim: muon` refuses: training files, and quantized checkpoints."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import transformers
import yaml
from accelerate.state import PartialState
from transformers import Qwen3Config, TrainingArguments
from typer.testing import CliRunner

from hf_muon.cli.app import app
from hf_muon.integrations.deepspeed.refusals import refuse_config
from hf_muon.integrations.llamafactory import v1 as llamafactory_v1
from hf_muon.integrations.transformers.refusals import refuse_unsupported
from hf_muon.routing.model_facts import text_config_of

ZERO3 = {"zero_optimization": {"stage": 3}}
QUANTIZED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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


def write_v1(tmp_path, folder, **keys):
    path = tmp_path / "v1.yaml"
    path.write_text(yaml.safe_dump({"model": str(folder), "optim_config": {"name": "muon"}, **keys}))
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


def test_a_kind_of_training_that_is_not_known_here(folder, tmp_path):
    result = call("inspect", write(tmp_path, folder, finetuning_type="oft"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "what finetuning_type oft trains is not known here. Known: full, freeze, lora" in result.stderr


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


REFUSED = [
    ({"deepspeed": "lost.json"}, "deepspeed: lost.json, seen from "),
    ({"deepspeed": "not even a path"}, "cannot be read as a DeepSpeed config"),
    (
        {"deepspeed": {**ZERO3, "optimizer": {"type": "AdamW"}}},
        '"optimizer" (AdamW), which DeepSpeed would use in place of Muon',
    ),
    ({"deepspeed": ZERO3, "optim_args": "momentum_dtype=int8"}, "momentum_dtype=int8 does not run under DeepSpeed"),
    ({"deepspeed": ZERO3, "optim_args": "adamw_state_dtype=int8"}, "adamw_state_dtype=int8 does not run under"),
    ({"deepspeed": ZERO3, "optim_args": "momentum_offload=cpu"}, "momentum_offload=cpu does not run under DeepSpeed"),
    ({"use_muon": True}, "use_muon: true would replace the optimizer"),
    ({"use_hyper_parallel": True}, "does not run with use_hyper_parallel: true"),
    ({"use_galore": True}, "use_galore: true would replace the optimizer"),
    ({"fsdp": True, "fsdp_config": {"version": 1}}, "does not run under FSDP version 1"),
    ({"deepspeed": 3}, "neither the path of a JSON file nor a mapping"),
    ({"fsdp": True, "fsdp_config": {"version": 2, "xla": True}}, "FSDP on XLA"),
    ({"fsdp": True, "fsdp_config": "lost.json"}, "No such file or directory: 'lost.json'"),
    ({"parallelism_config": {"cp_size": 2}}, "ParallelismConfig(cp_size)"),
    ({"parallelism_config": {"sp_size": 2}}, "without DeepSpeed"),
    (
        {"parallelism_config": {"sp_size": 2}, "deepspeed": ZERO3, "label_smoothing_factor": 0.1},
        "label_smoothing_factor is ignored under sequence parallel",
    ),
]
V1 = [
    ({"dist_config": {"name": "deepspeed"}}, "does not run under dist_config: deepspeed"),
    ({"cp_size": 2}, "cp_size: 2 needs dist_config: {name: fsdp2}"),
    ({"dist_config": "fsdp2"}, "dist_config: fsdp2 is no mapping. Write dist_config: {name: fsdp2}"),
    ({"optim_config": {"name": "muon", "momentun": 0.9}}, "'momentun' is not an option of muon"),
    ({"optim_config": "muon"}, "optim_config: muon is no mapping. Write optim_config: {name: muon}"),
]


class TestTrainingFiles:
    @pytest.mark.parametrize(("keys", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
    def test_refused(self, folder, tmp_path, keys, message):
        environment = dict(os.environ)
        result = call("inspect", write(tmp_path, folder, **keys), "--json")
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert message in result.stderr
        assert message in json.loads(result.stdout)["refused"][0]
        assert dict(os.environ) == environment

    def test_modules_of_another_optimizer_are_refused_and_ignored_where_that_one_runs(self, folder, tmp_path):
        result = call("inspect", write(tmp_path, folder, optim_target_modules=["mlp"]))
        assert (result.exit_code, "optim_target_modules=['mlp'] is for optimizers such as" in result.stderr) == (
            1,
            True,
        )
        galore = {"optim": "galore_adamw", "optim_target_modules": ["mlp"], "optim_args": "rank=8"}
        assert call("inspect", write(tmp_path, folder, **galore)).exit_code == 0

    @pytest.mark.parametrize(("keys", "message"), V1, ids=lambda value: value if isinstance(value, str) else "")
    def test_llamafactory_v1_refused(self, folder, tmp_path, keys, message):
        result = call("inspect", write_v1(tmp_path, folder, **keys))
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert message in result.stderr

    def test_megatron_is_chosen_in_the_environment(self, folder, tmp_path, monkeypatch):
        monkeypatch.setenv("USE_MCA", "1")
        result = call("inspect", write(tmp_path, folder, finetuning_type="full"))
        assert (result.exit_code, "does not run with USE_MCA=1" in result.stderr) == (1, True)
        assert call("inspect", write(tmp_path, folder)).exit_code == 0  # another script, which ignores USE_MCA

    def test_every_reason_is_shown_below_the_table(self, folder, tmp_path):
        keys = {"use_muon": True, "deepspeed": "lost.json", "fsdp": True, "fsdp_config": {"version": 1}}
        result = call("inspect", write(tmp_path, folder, **keys))
        assert "mlp.up_proj.weight " in result.stdout
        assert result.stderr.count("\n  - ") == 3

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"finetuning_type": "freeze", "freeze_trainable_layers": "many"}, "freeze does not fit the model: "),
            ({"finetuning_type": "lora", "lora_rank": "many"}, "lora does not fit the model: "),
        ],
    )
    def test_words_where_numbers_belong(self, folder, tmp_path, keys, message):
        result = call("inspect", write(tmp_path, folder, **keys))
        assert (result.exit_code, message in result.stderr) == (1, True), result.stderr

    def test_the_sentences_are_those_of_the_run(self, folder, tmp_path):
        fsdp = {"fsdp": True, "fsdp_config": {"version": 1}}
        with pytest.raises(RuntimeError) as at_run_time:
            refuse_unsupported(TrainingArguments(str(tmp_path), use_cpu=True, optim="muon", **fsdp))
        assert str(at_run_time.value) in call("inspect", write(tmp_path, folder, **fsdp)).stderr
        config = {**ZERO3, "optimizer": {"type": "Muon"}, "expert_parallel": {}}
        with pytest.raises(RuntimeError) as at_run_time:
            refuse_config(config)
        assert str(at_run_time.value) in call("inspect", write(tmp_path, folder, deepspeed=config)).stderr
        with pytest.raises(ValueError, match="cp_size") as wrong:
            llamafactory_v1.refuse_unsupported(SimpleNamespace(dist_config={}, cp_size=2))
        assert str(wrong.value) in call("inspect", write_v1(tmp_path, folder, cp_size=2)).stderr

    def test_of_another_optimizer_it_is_a_note(self, folder, tmp_path):
        result = call("inspect", write(tmp_path, folder, optim="adamw_torch", use_muon=True, optim_args="rank=8"))
        assert result.exit_code == 0, result.stderr
        assert "optim: muon would be refused: use_muon: true" in result.stdout

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
        assert "say --trust-remote-code, which runs it" in result.stderr

    def test_with_the_option(self, remote):
        result = call("inspect", remote, "--trust-remote-code", "--json")
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert (report["model"], report["muon"]) == ("Net", {"parameters": 1, "weights": 24})
