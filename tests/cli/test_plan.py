"""`hf-muon plan` on checkpoints and training files; tests/test_plan.py compares its numbers with measured steps."""

from __future__ import annotations

import json

import pytest
import torch

from hf_muon import MuonConfig, route_parameters
from hf_muon.plan import facts_of, numbers_of
from tests.cli.calls import call, report_of, training_yaml, transcript


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
    ("keys", "words", "run", "assumed"),
    [
        ({}, [], ("fsdp", 8, 8 * 2048), ["layout fsdp", "ranks 8", "sequence length 2048"]),
        ({"fsdp": True, "fsdp_config": {"version": 2}, "max_length": 32}, [], ("fsdp", 8, 8 * 32), ["ranks 8"]),
        (
            {"per_device_train_batch_size": 3, "deepspeed": {"zero_optimization": {"stage": 3}}},
            ["--sequence-length", 8, "--ranks", 2],
            ("zero3", 2, 3 * 8),
            [],
        ),
        (
            {"deepspeed": {"zero_optimization": {"stage": 0}}},
            ["--batch-size", 1, "--ranks", 2],
            ("ddp", 2, 2048),
            ["sequence length 2048"],
        ),
        ({"finetuning_type": "full", "cutoff_len": 96}, ["--layout", "single"], ("single", 1, 8 * 96), []),
    ],
)
def test_options_go_before_the_file_and_what_is_assumed_is_said(small, tmp_path, keys, words, run, assumed):
    file = training_yaml(tmp_path, small[1], **keys)
    report = report_of("plan", file, *words)
    assert (report["layout"], report["ranks"], report["tokens"]) == run
    shown = [line for line in call("plan", file, *words).stdout.splitlines() if line.startswith("Assumed: ")]
    assert shown == ([f"Assumed: {', '.join(assumed)}"] if assumed else [])


@pytest.mark.parametrize(
    ("of_config", "text", "layout", "dtype"),
    [
        ("bfloat16", "", "single", "bfloat16"),
        (None, "", "single", "float32"),
        ("bfloat16", "bf16: true", "single", "bfloat16"),
        ("bfloat16", "bf16: true", "fsdp", "float32"),
        ("float32", "model_init_kwargs: {dtype: bfloat16}", "ddp", "bfloat16"),
        ("bfloat16", "dtype: bfloat16\nuse_peft: true\noptim_args: lora=muon", "single", "float32"),
    ],
)
def test_weights_are_planned_in_the_dtype_in_which_the_run_stores_them(small, tmp_path, of_config, text, layout, dtype):
    """transformers 5 loads in the checkpoint's dtype; accelerate's FSDP2 raises it under mixed precision."""
    config = json.loads((small[1] / "config.json").read_text()) | {"dtype": of_config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {tmp_path}\noptim: muon\noutput_dir: out\n{text}\n")
    report = report_of("plan", file, "--layout", layout)
    assert report["dtype"] == dtype


@pytest.mark.parametrize("option", ["--batch-size", "--sequence-length", "--memory", "--tokens"])
def test_numbers_that_are_not_positive(option):
    result = call("plan", "qwen3-0.6b", option, "0")
    assert (result.exit_code, option in result.stderr) == (1, True)
