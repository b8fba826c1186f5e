"""What the commands of `hf-muon` refuse: files, models and numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
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


def refused(code, words, files: Mapping[str, Any] = {}, name="", says="", marks=()):
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

    return Refusal(code, f"hf-muon {words.split()[0]}", attempt, given=given, name=name, says=says, marks=marks)


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
    refused("not-on-hub", "inspect Qwen/kimi-k2", name="of_nobody"),
    refused("not-on-hub", "inspect meta-llama/Qwen3-8B", name="of_another_owner"),
    *(refused("give-the-command", f"inspect {file}", {file: "optim: muon"}, file) for file in ("run.yaml", "run.py")),
    refused("source-or-command", "inspect", name="neither"),
    refused("source-or-command", "inspect model -- python run.py", name="both"),
    refused("source-or-command", "inspect --optim-args lora=muon -- python run.py", name="options"),
    refused("no-such-command", "inspect -- nothing-like-it"),
    refused("no-python-command", "inspect -- bash run.sh"),
    *(
        refused(code, f"inspect -- {sys.executable} run.py", {"run.py": text}, name, says, [pytest.mark.slow])
        for code, name, text, says in (
            ("dry-run-not-begun", "", "print(1)", "has trained"),
            ("no-optimizer-made", "", "import torch", "do_train"),
            ("dry-run-failed", "", "import torch\nraise KeyError(3)", "KeyError: 3"),
        )
    ),
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
    refused("nothing-for-muon", "plan model --optim-args adamw_patterns=proj"),
]


REPORT = [
    refused("no-metrics", "report model"),
    refused("no-watched-step", "report run", {f"run/{FILE}": ""}),
]
CASES = [*INSPECT, *PLAN, *REPORT]
