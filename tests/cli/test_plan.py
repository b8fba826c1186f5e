"""`hf-muon plan` on checkpoints; tests/test_plan.py compares its numbers with measured steps."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_muon import MuonConfig, route_parameters
from hf_muon.plan import facts_of, numbers_of
from tests.cli.calls import call, report_of, transcript
from tests.e2e.harness import ROOT


@pytest.mark.promise("plan")
def test_json_is_the_plan(small):
    words = ["--layout", "hsdp", "--ranks", 8, "--dtype", "bf16", "--batch-size", 2, "--sequence-length", 64]
    report = report_of("plan", small[1], *words)
    run = {"layout": "hsdp", "ranks": 8, "dtype": torch.bfloat16, "tokens": 128}
    numbers = numbers_of(facts_of(small[0], route_parameters(small[0]), MuonConfig(), **run))
    for name in ("weights", "gradients", "state", "adamw_state", "sent", "flops", "temporary", "activations"):
        assert report[name] == getattr(numbers, name), name
    assert report["peak"] == max(
        sum(each) for each in zip(numbers.weights, numbers.gradients, numbers.state, strict=True)
    ) + max(numbers.temporary, numbers.activations)


def test_what_is_shown(small, tmp_path, golden):
    """Show ranks that differ, a GPU's memory beside what is counted, and a model whose activations are not known."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    words = ["--layout", "zero1", "--ranks", 4, "--memory", 24, "--tokens", 65536]
    calls = [["plan", small[1], *words], ["plan", tmp_path, "--layout", "single", "--dtype", "bf16"]]
    golden("cli/plan", transcript(*calls), MODEL=small[1], GPT2=tmp_path)


@pytest.mark.parametrize(
    ("words", "run", "assumed"),
    [
        ([], ("fsdp", 8, 2048), ["layout fsdp", "ranks 8", "batch size 1", "sequence length 2048"]),
        (["--layout", "single", "--batch-size", 3], ("single", 1, 3 * 2048), ["sequence length 2048"]),
        (["--layout", "ddp", "--ranks", 2, "--batch-size", 1, "--sequence-length", 8], ("ddp", 2, 8), []),
    ],
)
def test_what_is_assumed_is_said(small, words, run, assumed):
    report = report_of("plan", small[1], *words)
    assert (report["layout"], report["ranks"], report["tokens"]) == run
    shown = [line for line in call("plan", small[1], *words).stdout.splitlines() if line.startswith("Assumed: ")]
    assert shown == ([f"Assumed: {', '.join(assumed)}"] if assumed else [])


@pytest.mark.parametrize(("of_config", "dtype"), [("bfloat16", "bfloat16"), (None, "float32")])
def test_weights_are_planned_in_the_dtype_of_the_model(small, tmp_path, of_config, dtype):
    config = json.loads((small[1] / "config.json").read_text()) | {"dtype": of_config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert report_of("plan", tmp_path, "--layout", "single")["dtype"] == dtype


@pytest.mark.parametrize(
    "option", ["--batch-size", "--sequence-length", "--memory", "--tokens", "--memory=nan", "--memory=inf"]
)
def test_numbers_that_are_no_sizes(option):
    option, _, value = option.partition("=")
    result = call("plan", "qwen3-0.6b", option, value or "0")
    assert (result.exit_code, option in result.stderr) == (1, True)


SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model, reference = (AutoModelForCausalLM.from_pretrained({folder!r}, dtype="bfloat16") for _ in range(2))
data = [dict(input_ids=torch.arange(32), labels=torch.arange(32))] * 8
args = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, gradient_checkpointing=True, use_cpu=True)
args |= dict(optim="muon", optim_args="momentum_dtype=bf16", report_to="none")
Trainer(model, TrainingArguments("out", **args), train_dataset=data).train()
"""


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_says_its_options_its_batch_and_its_models(small, tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT.format(folder=str(small[1])))
    command = ["--", sys.executable, tmp_path / "run.py"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small[1]), dtype=torch.bfloat16)
    routes, config = route_parameters(model), MuonConfig(momentum_dtype="bf16")
    copy = sum(2 * param.numel() for param in model.parameters())
    bf16 = dict.fromkeys(("dtype", "frozen_dtype", "compute_dtype"), torch.bfloat16)
    for words, run in (([], {}), (["--layout", "zero3", "--ranks", 4], {"layout": "zero3", "ranks": 4})):
        printed = call("plan", "--json", *words, *command)
        assert printed.exit_code == 0, printed.stderr
        report = json.loads(printed.stdout)
        numbers = numbers_of(facts_of(model, routes, config, tokens=4 * 32, others=copy, **bf16, **run))
        for name in ("weights", "gradients", "state", "adamw_state", "activations"):
            assert report[name] == getattr(numbers, name), name


@pytest.mark.extended
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("8b_sft", ["--layout", "single", "--dtype", "bf16"]),
        ("zero3", ["--layout", "zero3", "--ranks", 8]),
        ("fsdp2", ["--layout", "fsdp", "--ranks", 8, "--dtype", "fp32"]),
    ],
    ids=str,
)
def test_peaks_on_the_page_of_llamafactory(file, words):
    page = (ROOT / "docs" / "recipes" / "llamafactory.md").read_text(encoding="utf-8")
    peak = report_of("plan", "qwen3-8b", *words)["peak"]
    row = rf"^\|[^|]+\| \[?`llamafactory_qwen3_{file}.yaml`[^|]*\| ([\d.]+) GB \|$"
    assert re.search(row, page, re.MULTILINE)[1] == f"{peak / 1e9:.1f}"
