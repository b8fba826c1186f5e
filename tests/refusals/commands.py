"""What the commands of `hf-muon` refuse: files, models and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_muon.cli.model_source import model_from
from hf_muon.diagnostics.log import FILE
from tests.cli.calls import call
from tests.refusals import Refusal

CONFIG = Qwen3Config(
    vocab_size=60,
    hidden_size=16,
    intermediate_size=40,
    num_hidden_layers=2,
    head_dim=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    architectures=["Qwen3ForCausalLM"],
)


def refused(code, words, files: Mapping[str, Any] = {}, name="", says=""):
    """Return the case of a command called in a folder with a model and files, each a text, or what makes its bytes."""

    def given(tmp_path):
        CONFIG.save_pretrained(tmp_path / "model")
        for file, content in files.items():
            content = content() if callable(content) else content
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    def attempt(given, monkeypatch):
        monkeypatch.chdir(given)
        result = call(*words.split())
        assert result.exit_code == 1, result.stderr
        return result.stderr

    return Refusal(code, f"hf-muon {words.split()[0]}", attempt, given=given, name=name, says=says)


def of_file(code, text, command="inspect run.yaml", name=""):
    return refused(code, command, {"run.yaml": text}, name)


def reading_weights(tmp_path, monkeypatch):
    plain = Qwen3ForCausalLM.__init__

    def reads(self, config):
        plain(self, config)
        self.lm_head.weight.tolist()

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", reads)
    CONFIG.save_pretrained(tmp_path)
    model_from(tmp_path)


INSPECT = [
    Refusal("constructor-computes", "hf-muon inspect", reading_weights),
    refused("no-such-source", "inspect ./nowhere"),
    refused("not-on-hub", "inspect nothing-like-it", name="without_owner"),
    refused("not-on-hub", "inspect nobody/nothing"),
    refused("no-config-json", "inspect empty", {"empty/file": ""}),
    of_file("unreadable-file", "a: ["),
    refused("unreadable-file", "inspect run.json", {"run.json": '{"a": '}, name="json", says="as JSON"),
    of_file("not-a-mapping", "- a"),
    of_file("no-model", "optim: muon"),
    *(
        refused("no-model", f"inspect {file}", {file: text}, name, says=f"{name}.*training file")
        for name, file, text in (
            ("accelerate", "run.yaml", "distributed_type: FSDP"),
            ("axolotl", "run.yaml", "base_model: model\nadapter: lora"),
            ("DeepSpeed", "ds.json", '{"zero_optimization": {"stage": 3}}'),
        )
    ),
    refused("not-a-training-file", "inspect run.sh", {"run.sh": "llamafactory-cli train run.yaml"}),
    of_file("no-such-source", "model_name_or_path: ./lost", name="of_a_file"),
    of_file("optim-config-in-v0", "model_name_or_path: model\noptim_config: {name: muon}"),
    *(
        refused("unbuildable-model", "inspect config.json", {"config.json": text}, name)
        for name, text in (("no_json", "{"), ("empty", "{}"), ("unknown", '{"model_type": "unheard"}'))
    ),
    refused("unbuildable-model", "inspect config.json", {"config.json": '{"model_type": "qwen3", "hidden_size": "x"}'}),
]
PLAN = [
    refused("no-such-source", "plan ./nowhere"),
    refused("invalid-value", "plan model --layout fspd", name="layout"),
    refused("invalid-value", "plan model --ranks 0", name="ranks"),
    refused("replicas-misfit", "plan model --layout hsdp --replicas 3"),
    of_file("lora-without-muon", "model_name_or_path: model\noptim: muon\nuse_peft: true", "plan run.yaml"),
    refused("nothing-for-muon", "plan model --optim-args adamw_patterns=proj"),
]


REPORT = [
    refused("no-metrics", "report model"),
    refused("no-watched-step", "report run", {f"run/{FILE}": ""}),
]
CASES = [*INSPECT, *PLAN, *REPORT]
