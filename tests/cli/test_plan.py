"""`hf-muon plan` on checkpoints and training files; tests/plan compares plans with measured steps."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from hf_muon import MuonConfig
from hf_muon.cli.model_source import known_configs, model_from
from hf_muon.plan.memory import Memory, Training
from hf_muon.plan.step_plan import plan_step
from tests.cli.calls import call, report_of, training_yaml, transcript

ROOT = Path(__file__).parents[2]


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
    """Show each layout, whether a run fits, moments on the host, and a model whose activations are not estimated."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    sizes = ["--layout", "single", "--dtype", "bf16", "--batch-size", 2, "--sequence-length", 64]
    calls = [["plan", small[1], "--layout", layout, "--ranks", 4] for layout in ("ddp", "fsdp", "zero1", "zero3")]
    calls += [["plan", small[1], *sizes, "--memory", memory] for memory in (24, 1e-6)]
    calls += [["plan", small[1], "--layout", "single", "--optim-args", "momentum_offload=cpu"]]
    calls += [["plan", tmp_path, "--layout", "single"]]
    golden("cli/plan", transcript(*calls), MODEL=small[1], GPT2=tmp_path)


@pytest.mark.parametrize(
    ("keys", "words", "sizes"),
    [
        ({"template": "qwen3", "cutoff_len": 96, "per_device_train_batch_size": 3, "pure_bf16": True}, [], (3, 96, 1)),
        ({"template": "qwen3", "disable_gradient_checkpointing": True}, [], (1, 2048, 0)),
        ({"gradient_checkpointing": True, "max_length": 32}, ["--batch-size", 2, "--dtype", "bf16"], (2, 32, 1)),
        ({"gradient_checkpointing": True}, ["--no-gradient-checkpointing"], (1, 2048, 0)),
        ({"activation_checkpointing": True, "max_length": 32}, ["--dtype", "bf16"], (1, 32, 1)),
        ({"activation_checkpointing": False, "gradient_checkpointing": False}, [], (1, 2048, 0)),
    ],
)
def test_sizes_of_a_training_file(small, tmp_path, keys, words, sizes):
    kind = {"finetuning_type": "full"} if "template" in keys else {}
    file = training_yaml(tmp_path, small[1], output_dir="out", **kind, **keys)
    report = report_of("plan", file, "--layout", "single", *words)["memory"]
    batch, length, small_and_checkpointed = sizes
    dtype = torch.bfloat16 if small_and_checkpointed else torch.float32
    training = Training(batch, length, gradient_checkpointing=bool(small_and_checkpointed))
    memory = plan_step(small[0], MuonConfig(), "single", 1, dtype=dtype, training=training).memory
    assert (report["activations"], report["weights"]) == (memory.activations, memory.weights)


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
        ("float32", "dtype: bfloat16", "single", "bf16"),
        ("float32", "torch_dtype: bfloat16", "fsdp", "bf16"),
        ("float32", "model_init_kwargs: {dtype: bfloat16}", "ddp", "bf16"),
        ("float32", "model_init_kwargs: {torch_dtype: float16}", "ddp", "fp16"),
        ("bfloat16", "dtype: float32", "single", "fp32"),
        ("bfloat16", "dtype: auto", "single", "bf16"),
        ("bfloat16", "bf16: true", "single", "bf16"),
        ("bfloat16", "bf16: true", "fsdp", "fp32"),
        ("bfloat16", "dtype: bfloat16\nuse_peft: true\noptim_args: lora=muon", "single", "fp32"),
        ("bfloat16", "dataset_text_field: text", "single", "fp32"),
        ("bfloat16", "dataset_text_field: text\ndtype: auto", "single", "bf16"),
        ("bfloat16", "finetuning_type: full\nbf16: true", "single", "fp32"),
        ("float32", "finetuning_type: full\npure_bf16: true", "fsdp", "bf16"),
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


@pytest.mark.extended
@pytest.mark.parametrize(
    ("file", "layout", "ranks"), [("8b_sft", "single", 1), ("zero3", "zero3", 8), ("fsdp2", "fsdp", 8)], ids=str
)
def test_peaks_on_the_page_of_llamafactory(file, layout, ranks):
    page = (ROOT / "docs" / "recipes" / "llamafactory.md").read_text(encoding="utf-8")
    file = f"llamafactory_qwen3_{file}.yaml"
    printed = call("plan", ROOT / "examples" / "yaml" / file, "--layout", layout, "--ranks", ranks).output
    peaks = [float(peak) for peak in re.findall(r"peak [^│]+│ +([\d.]+) GB", printed)]
    assert re.search(rf"^\|[^|]+\| \[?`{file}`[^|]*\| ([\d.]+) GB \|$", page, re.MULTILINE)[1] == f"{max(peaks):.1f}"
