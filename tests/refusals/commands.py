"""What the commands of `hf-muon` refuse: files, models, numbers, and states of other optimizers."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_muon.cli.model_source import model_from
from hf_muon.diagnostics.log import FILE
from tests.cli.calls import call
from tests.refusals import Refusal
from tests.support.other_muons import gradients, moonlight_like, run

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


def refused(code, words, files: Mapping[str, Any] = {}, name="", exit_code=1, says=""):
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
        result = call(*words.split(), COLUMNS="300")
        assert (result.exit_code, type(result.exception)) == (exit_code, SystemExit), result.output
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
    refused("invalid-value", "plan model --dtype fp8", name="dtype"),
    refused("replicas-misfit", "plan model --layout hsdp --replicas 3"),
    of_file("lora-without-muon", "model_name_or_path: model\noptim: muon\nuse_peft: true", "plan run.yaml"),
    refused("nothing-for-muon", "plan model --optim-args adamw_patterns=proj"),
]

TRIALS = "sweep run.yaml --rates 1e-5,1e-4 --steps 30 -- no-such-program {file}"
# Ends the sweep as a scheduler does.
END = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
RUN = "model_name_or_path: model\nlearning_rate: 1.0e-4\noptim: muon\n"


def interrupted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return call("sweep", "run.yaml", "--rates", "1e-5", "--steps", 30, "--", sys.executable, "-c", END, "{file}").stderr


SWEEP = [
    of_file("warmup-too-long", f"{RUN}warmup_steps: 30", TRIALS),
    of_file("fixed-muon-rate", f"{RUN}optim_args: muon_lr=0.02", TRIALS),
    of_file("fixed-muon-rate", f"{RUN}optim_args: lr=0.02", TRIALS, "lr"),
    of_file("unknown-option", f"{RUN}optim_args: momentun=0.02", TRIALS),
    of_file("fsdp1", f"{RUN}fsdp: full_shard\nfsdp_config: {{version: 1}}", TRIALS),
    of_file("loss-of-reward", f"{RUN}stage: ppo", TRIALS),
    of_file("no-model", "optim: muon", TRIALS),
    refused(
        "folder-exists", TRIALS.replace("--steps", "--out . --steps"), {"run.yaml": RUN, "1e-4/x": ""}, says="1e-4 "
    ),
    Refusal("interrupted", "hf-muon sweep", interrupted),
    refused("no-file-placeholder", "sweep run.yaml --rates 1e-5 -- train", {"run.yaml": RUN}, exit_code=2),
]


REPORT = [
    refused("no-metrics", "report model"),
    refused("no-watched-step", "report run", {f"run/{FILE}": ""}),
]


@functools.cache
def state() -> bytes:
    """Return the file of an optimizer like LLaMA-Factory's `use_muon: true`."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG)
    optimizer = moonlight_like(model)
    run(model, gradients(model, 1), optimizer)
    return pickled(optimizer.state_dict())


def pickled(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def convert(code, content, options="", source="llamafactory-v0", model="model", name="", **files):
    """Return the case of a conversion; content is that of the source's file, or makes it."""
    files = {"state.pt": content, **{file.replace("_", "."): text for file, text in files.items()}}
    return refused(code, f"convert state.pt out.pt --from {source} --model {model} {options}", files, name)


CONVERT = [
    convert("unreadable-checkpoint", json.dumps({}).encode(), name="json"),
    convert("unreadable-checkpoint", lambda: pickled(subprocess.Popen), name="unsafe"),
    convert("unreadable-checkpoint", lambda: state()[:5000], name="half"),
    convert("not-a-state", lambda: pickled({"weight": torch.ones(2)})),
    convert("unknown-format", state, source="moonlit"),
    convert("foreign-state", state, source="torch"),
    convert("no-such-source", state, model="/nowhere"),
    convert("unknown-option", state, "--optim-args momentun=0.9"),
    convert("routing-changed", state, "--optim-args adamw_patterns=up_proj"),
    convert("unbuildable-model", state, model="config.json", config_json="{}"),
    convert("target-exists", state, out_pt="mine"),
]
CASES = [*INSPECT, *PLAN, *SWEEP, *REPORT, *CONVERT]
