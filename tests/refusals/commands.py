"""What the commands of `hf-muon` refuse: files, models, numbers, and states of other optimizers."""

from __future__ import annotations

import functools
import io
import json
import subprocess
from collections.abc import Mapping

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.cli.calls import call
from tests.diagnostics.pages import FILE, write
from tests.other_muons import gradients, moonlight_like, run
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


def refused(code, words, files: Mapping[str, str | bytes] = {}, name=""):
    """Return the case of a command that is called in a folder with a model and files."""

    def given(tmp_path):
        CONFIG.save_pretrained(tmp_path / "model")
        for file, content in files.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    def attempt(given, monkeypatch):
        monkeypatch.chdir(given)
        result = call(*words.split() if isinstance(words, str) else words, COLUMNS="300")
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
        return result.stderr

    return Refusal(code, f"hf-muon {words.split()[0]}", attempt, given=given, name=name)


def of_file(code, text, command="inspect run.yaml", name=""):
    return refused(code, command, {"run.yaml": text}, name)


INSPECT = [
    refused("no-such-source", "inspect nowhere"),
    refused("not-on-hub", "inspect nobody/nothing"),
    refused("no-config-json", "inspect empty", {"empty/file": ""}),
    of_file("unreadable-yaml", "a: ["),
    of_file("not-a-mapping", "- a"),
    of_file("no-model", "optim: muon"),
    of_file("no-such-source", "model_name_or_path: ./lost", name="of_a_file"),
    of_file("optim-config-in-v0", "model_name_or_path: model\noptim_config: {name: muon}"),
    of_file("unknown-option", "model_name_or_path: model\noptim_args: ns_step=3"),
    of_file("rival-optimizer", "model_name_or_path: model\noptim: muon\nuse_muon: true", name="muon"),
    of_file("rival-optimizer", "model_name_or_path: model\noptim: hf_muon\nuse_muon: true", name="hf_muon"),
    of_file("finetuning-misfit", "model_name_or_path: model\noptim: muon\nlora_target: nothing_like_it"),
    of_file("lora-without-muon", "model_name_or_path: model\noptim: muon\nfinetuning_type: lora"),
    *(
        refused("unbuildable-model", "inspect config.json", {"config.json": text}, name)
        for name, text in (("no_json", "{"), ("empty", "{}"), ("unknown", '{"model_type": "unheard"}'))
    ),
    refused("unbuildable-model", "inspect config.json", {"config.json": '{"model_type": "qwen3", "hidden_size": "x"}'}),
]
PLAN = [
    refused("no-such-source", "plan nowhere"),
    refused("invalid-value", "plan model --layout fspd", name="layout"),
    refused("invalid-value", "plan model --ranks 0", name="ranks"),
    refused("invalid-value", "plan model --dtype fp8", name="dtype"),
    of_file("invalid-value", "model_name_or_path: model\noptim: muon\ndtype: int8", "plan run.yaml", "dtype_of_a_file"),
    refused("replicas-misfit", "plan model --layout hsdp --replicas 3"),
]

TRIALS = "sweep run.yaml --rates 1e-5,1e-4 --steps 30 -- no-such-program {file}"
RUN = "model_name_or_path: model\nlearning_rate: 1.0e-4\noptim: muon\n"
SWEEP = [
    of_file("warmup-too-long", f"{RUN}warmup_steps: 30", TRIALS),
    of_file("fixed-muon-rate", f"{RUN}optim_args: muon_lr=0.02", TRIALS),
    of_file("unknown-option", f"{RUN}optim_args: momentun=0.02", TRIALS),
    of_file("fsdp1", f"{RUN}fsdp: full_shard\nfsdp_config: {{version: 1}}", TRIALS),
    of_file("loss-of-reward", f"{RUN}stage: ppo", TRIALS),
    of_file("no-model", "optim: muon", TRIALS),
]


def metrics(*more):
    """Return a file of metrics whose eighth line is another, or that is empty."""

    def given(tmp_path):
        write(tmp_path / "run").open("a").write("".join(f"{line}\n" for line in more))
        return tmp_path

    return given


def reported(given, monkeypatch):
    monkeypatch.chdir(given)
    result = call("report", "run")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    return result.stderr


REPORT = [
    refused("no-such-run", "report lost"),
    refused("no-metrics", "report model"),
    refused("no-watched-step", "report run", {f"run/{FILE}": ""}),
    *(
        Refusal("bad-metrics-line", "hf-muon report", reported, given=metrics(line), says="line 8", name=name)
        for name, line in {
            "list": "[]",
            "unknown": '{"event":"dance"}',
            "no_step": '{"event":"step"}',
            "few_values": '{"event":"step","step":40,"update_rms":[1]}',
            "text_in_values": '{"event":"step","step":40,"update_rms":["x",1,1,1,1,1,1]}',
            "step_is_a_word": '{"event":"log","step":"often"}',
            "parameter_without_name": '{"event":"start","parameters":[{}]}',
            "model_is_a_number": '{"event":"start","parameters":[],"model":3}',
            "options_are_a_word": '{"event":"start","parameters":[],"options":"x"}',
        }.items()
    ),
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

    def given(tmp_path):
        CONFIG.save_pretrained(tmp_path / "model")
        (tmp_path / "state.pt").write_bytes(content() if callable(content) else content)
        for file, text in files.items():
            (tmp_path / file.replace("_", ".")).write_text(text)
        return tmp_path

    def attempt(given, monkeypatch):
        monkeypatch.chdir(given)
        result = call("convert", "state.pt", "out.pt", "--from", source, "--model", model, *options.split())
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
        return result.stderr

    return Refusal(code, "hf-muon convert", attempt, given=given, name=name)


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
