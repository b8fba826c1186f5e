"""`hf-muon plan` on checkpoints and training files; tests/plan compares plans with measured steps."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
import transformers

from hf_muon import MuonConfig
from hf_muon.cli.model_source import known_configs, model_from
from hf_muon.plan.memory import Memory, Training
from hf_muon.plan.step_plan import plan_step
from tests.cli.calls import call, report_of, training_yaml, transcript


@pytest.mark.promise("plan")
def test_json_is_the_plan(small):
    report = report_of("plan", small[1], "--layout", "hsdp", "--ranks", 8)
    plan = plan_step(small[0], MuonConfig(), "hsdp", 8)
    for name in ("sent_bytes", "state_bytes", "flops"):
        assert report[name] == getattr(plan, name)
    words = ["--layout", "single", "--dtype", "bf16", "--batch-size", 2, "--sequence-length", 64]
    report = report_of("plan", small[1], *words, "--gradient-checkpointing")
    assert report == report_of("plan", small[1], *words, "--gradient-checkpointing", "--ranks", 1)
    training = Training(2, 64, gradient_checkpointing=True)
    plan = plan_step(small[0], MuonConfig(), "single", 1, dtype=torch.bfloat16, training=training)
    for name in ("memory", "adamw_memory"):
        assert report[name] == dataclasses.asdict(getattr(plan, name))


def test_what_is_shown(small, tmp_path, golden):
    """Show each layout, whether a run fits, and a model whose activations are not estimated."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    sizes = ["--layout", "single", "--dtype", "bf16", "--batch-size", 2, "--sequence-length", 64]
    calls = [["plan", small[1], "--layout", layout, "--ranks", 4] for layout in ("ddp", "fsdp", "zero1", "zero3")]
    calls += [["plan", small[1], *sizes, "--memory", memory] for memory in (24, 1e-6)]
    calls += [["plan", tmp_path, "--layout", "single"]]
    golden("cli/plan", transcript(*calls), MODEL=small[1], GPT2=tmp_path)


@pytest.mark.parametrize(
    ("keys", "words", "sizes"),
    [
        ({}, [], (8, 2048, False, "fp32")),
        ({"bf16": True, "per_device_train_batch_size": 3}, [], (3, 2048, False, "bf16")),
        (
            {"gradient_checkpointing": True},
            ["--no-gradient-checkpointing", "--batch-size", 2],
            (2, 2048, False, "fp32"),
        ),
        ({"activation_checkpointing": True}, ["--sequence-length", 32], (8, 32, True, "fp32")),
        ({"dataset_text_field": "text"}, [], (8, 1024, True, "bf16")),
        ({"finetuning_type": "full", "cutoff_len": 96, "bf16": True}, [], (8, 96, False, "bf16")),
        ({"max_length": 64, "gradient_checkpointing": False, "bf16": False}, [], (8, 64, False, "fp32")),
    ],
)
def test_sizes_of_a_training_file(small, tmp_path, keys, words, sizes):
    report = report_of("plan", training_yaml(tmp_path, small[1], **keys), "--layout", "single", *words)
    names = ("batch_size", "sequence_length", "gradient_checkpointing", "compute_dtype")
    assert tuple(report[name] for name in names) == sizes
    compute = {"bf16": torch.bfloat16, "fp32": torch.float32}[sizes[-1]]
    training = Training(*sizes[:3], compute_dtype=compute, frozen_dtype=torch.float32)
    memory = plan_step(small[0], MuonConfig(), "single", 1, training=training).memory
    assert report["memory"]["activations"] == memory.activations


def test_sizes_of_a_file_of_llamafactory_v1_which_is_not_installed(small, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {small[1]}\noptim_config: {{name: muon}}\nmicro_batch_size: 16\ncutoff_len: 512\n")
    report = report_of("plan", file)
    assert (report["batch_size"], report["sequence_length"]) == (16, 512)


@pytest.mark.parametrize(
    ("keys", "words", "layout", "assumed"),
    [
        ({}, [], "fsdp", {"layout": "fsdp", "ranks": 8, "sequence_length": 2048}),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, [], "zero3", {"ranks": 8, "sequence_length": 2048}),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}}},
            ["--layout", "ddp", "--ranks", 2],
            "ddp",
            {"sequence_length": 2048},
        ),
        ({"deepspeed": {"zero_optimization": {"stage": 0}}}, ["--ranks", 2, "--sequence-length", 8], "ddp", {}),
        ({"fsdp": True, "fsdp_config": {"version": 2}}, ["--sequence-length", 8], "fsdp", {"ranks": 8}),
    ],
)
def test_the_layout_is_the_files_and_what_is_assumed_is_said(small, tmp_path, keys, words, layout, assumed):
    file = training_yaml(tmp_path, small[1], **keys)
    report = report_of("plan", file, *words)
    assert (report["layout"], report["assumed"]) == (layout, assumed)
    shown = [line for line in call("plan", file, *words).stdout.splitlines() if line.startswith("Assumed: ")]
    assert shown == ([f"Assumed: {', '.join(f'{key} {value}' for key, value in assumed.items())}"] if assumed else [])


def test_what_checkpointing_would_make_of_a_run_that_does_not_fit(small):
    """Compute it for each side: one bound between both peaks, and one below them."""
    words = ["--layout", "single", "--dtype", "bf16", "--batch-size", 64, "--optim-args", "max_batch_bytes=1"]
    with_and_without = [report_of("plan", small[1], *words, *more) for more in ([], ["--gradient-checkpointing"])]
    for side, name in (("memory", "Muon"), ("adamw_memory", "AdamW")):
        before, after = (peak_of(report[side]) for report in with_and_without)
        for memory, says in (((before + after) / 2, "it would fit: "), (after / 2, "it would not fit, either: ")):
            shown = call("plan", small[1], *words, "--memory", memory / 1e9).stdout
            text = re.search(rf"with {name}: does not fit: .*With --gradient-checkpointing {says}([\d.]+) MB", shown)
            assert float(text[1]) * 1e6 == pytest.approx(after, rel=1e-2)
        shown = call("plan", small[1], *words, "--memory", after / 2e9, "--gradient-checkpointing").stdout
        assert "too much\n" in shown


def peak_of(memory):
    return Memory(**memory).peak


@pytest.mark.parametrize(
    ("of_config", "text", "layout", "dtype"),
    [
        ("bfloat16", "", "single", "bf16"),
        ("float32", "", "single", "fp32"),
        (None, "", "single", "fp32"),
        ("float32", "packing: false\ndtype: bfloat16", "single", "bf16"),
        ("float32", "model_init_kwargs: {dtype: bfloat16}", "ddp", "bf16"),
        ("bfloat16", "packing: false\ndtype: float32", "single", "fp32"),
        ("bfloat16", "packing: false\ndtype: auto", "single", "bf16"),
        ("bfloat16", "bf16: true", "single", "bf16"),
        ("bfloat16", "bf16: true", "fsdp", "fp32"),
        ("bfloat16", "dtype: bfloat16\nuse_peft: true\noptim_args: lora=muon", "single", "fp32"),
        ("bfloat16", "dataset_text_field: text", "single", "fp32"),
        ("bfloat16", "dataset_text_field: text\ndtype: auto", "single", "bf16"),
    ],
)
def test_weights_are_planned_in_the_dtype_in_which_the_run_stores_them(small, tmp_path, of_config, text, layout, dtype):
    """transformers 5 loads in the checkpoint's dtype; accelerate's FSDP2 raises it under mixed precision."""
    config = json.loads((small[1] / "config.json").read_text()) | {"dtype": of_config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {tmp_path}\noptim: muon\noutput_dir: out\n{text}\n")
    ranks = 1 if layout == "single" else 2
    for source in [file, *([tmp_path] if not text else [])]:
        assert report_of("plan", source, "--layout", layout, "--ranks", ranks)["dtype"] == dtype


def test_a_known_model_by_its_name_on_the_hub_and_wrong_numbers(monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)  # nothing is fetched
    assert model_from("Qwen/Qwen3-0.6B").config.hidden_size == known_configs()["qwen3-0.6b"]["hidden_size"]
    for option, number in (("--batch-size", "0"), ("--sequence-length", "-1"), ("--memory", "0")):
        result = call("plan", "qwen3-0.6b", option, number)
        assert (result.exit_code, option in result.stderr) == (2, True)


@pytest.mark.extended
def test_a_trillion_weights_on_a_thousand_ranks():
    report = report_of("plan", "kimi-k2", "--ranks", 1024)
    assert 1.0e12 < report["muon_weights"] < 1.03e12
    assert max(report["flops"]) * 1024 < 1.05 * sum(report["flops"])
    assert sum(report["flops"]) == plan_step(model_from("kimi-k2"), MuonConfig(), "single", 1).flops[0]
    state = 4 * report["muon_weights"] + 8 * report["adamw_weights"]
    assert sum(report["state_bytes"]) == pytest.approx(state, rel=1e-3)
