"""`hf-muon plan` on checkpoints and training files."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
import transformers

from hf_muon import MuonConfig
from hf_muon.cli.model_source import known_configs, model_from
from hf_muon.plan.memory import Training
from hf_muon.plan.step_plan import plan_step
from tests.cli.calls import as_process, call


class TestPlan:
    """The command alone; tests/plan/test_step_plan.py compares plans with measured steps."""

    def test_as_a_process(self, small):
        result = as_process("plan", small[1], "--layout", "hsdp", "--ranks", "8", "--json")
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        plan = plan_step(small[0], MuonConfig(), "hsdp", 8)
        assert (report["sent_bytes"], report["state_bytes"], report["flops"]) == (
            plan.sent_bytes,
            plan.state_bytes,
            plan.flops,
        )

    @pytest.mark.parametrize("layout", ["single", "ddp", "fsdp", "zero1", "zero3"])
    def test_a_table(self, small, layout):
        result = call("plan", small[1], "--layout", layout, "--ranks", 1 if layout == "single" else 4)
        assert result.exit_code == 0, result.output
        assert re.search(r"optimizer state +│ +[\d.]+ kB", result.stdout)
        assert "exact; temporary buffers are a bound" in result.stdout

    def test_a_single_process_needs_no_number_of_ranks(self, small):
        with_ranks, without = (
            call("plan", small[1], "--layout", "single", "--json", *ranks).stdout for ranks in (("--ranks", 1), ())
        )
        assert json.loads(without) == json.loads(with_ranks)

    def test_whether_it_fits(self, small):
        words = ["--layout", "single", "--dtype", "bf16", "--batch-size", 2, "--sequence-length", 64]
        result = call("plan", small[1], *words, "--gradient-checkpointing", "--memory", 24, "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        training = Training(2, 64, gradient_checkpointing=True)
        plan = plan_step(small[0], MuonConfig(), "single", 1, dtype=torch.bfloat16, training=training)
        for name, side in (("memory", plan.memory), ("adamw_memory", plan.adamw_memory)):
            assert report[name] == dataclasses.asdict(side)
        result = call("plan", small[1], *words, "--memory", 24)
        assert re.search(r"24 GB with Muon: fits, [\d.]+ GB left", result.stdout)
        result = call("plan", small[1], *words, "--memory", 1e-6)
        assert re.search(r"0\.?\d*e?-?\d* GB with Muon: does not fit: [\d.]+ .B too much", result.stdout)

    @pytest.mark.parametrize(
        ("text", "words", "sizes"),
        [
            ("template: qwen3\ncutoff_len: 96\nper_device_train_batch_size: 3\npure_bf16: true", [], (3, 96, True, 2)),
            ("template: qwen3\ndisable_gradient_checkpointing: true", [], (1, 2048, False, 4)),
            ("gradient_checkpointing: true\nmax_length: 32", ["--batch-size", 2, "--dtype", "bf16"], (2, 32, True, 2)),
            ("gradient_checkpointing: true", ["--no-gradient-checkpointing"], (1, 2048, False, 4)),
        ],
    )
    def test_sizes_of_a_training_file(self, small, tmp_path, text, words, sizes):
        file = tmp_path / "run.yaml"
        kind = "finetuning_type: full\n" if "template" in text else ""
        file.write_text(f"model_name_or_path: {small[1]}\noptim: muon\noutput_dir: out\n{kind}{text}\n")
        result = call("plan", file, "--layout", "single", "--json", *words)
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)["memory"]
        batch, length, checkpointing, itemsize = sizes
        dtype = torch.bfloat16 if itemsize == 2 else torch.float32
        training = Training(batch, length, gradient_checkpointing=checkpointing)
        plan = plan_step(small[0], MuonConfig(), "single", 1, dtype=dtype, training=training)
        assert report["activations"] == plan.memory.activations
        assert report["weights"] == plan.memory.weights

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
    def test_weights_are_planned_in_the_dtype_in_which_the_run_stores_them(
        self, small, tmp_path, of_config, text, layout, dtype
    ):
        """transformers 5 loads in the checkpoint's dtype; accelerate's FSDP2 raises it under mixed precision."""
        config = json.loads((small[1] / "config.json").read_text()) | {"dtype": of_config}
        (tmp_path / "config.json").write_text(json.dumps(config))
        file = tmp_path / "run.yaml"
        file.write_text(f"model_name_or_path: {tmp_path}\noptim: muon\noutput_dir: out\n{text}\n")
        for source in [file, *([tmp_path] if not text else [])]:
            ranks = 1 if layout == "single" else 2
            result = call("plan", source, "--layout", layout, "--ranks", ranks, "--json")
            assert result.exit_code == 0, result.output
            assert json.loads(result.stdout)["dtype"] == dtype

    def test_a_named_dtype_is_one_that_can_be_trained(self, small, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text(f"model_name_or_path: {small[1]}\noptim: muon\ndtype: int8\n")
        assert "dtype: int8 is not a dtype of trained weights. Valid: fp32" in call("plan", file).stderr

    def test_moments_on_the_host(self):
        words = ["qwen3-0.6b", "--layout", "single", "--optim-args", "momentum_offload=cpu"]
        result = call("plan", *words)
        assert result.exit_code == 0, result.output
        assert re.search(r"optimizer state on the host +│ +[\d.]+ GB", result.stdout)

    def test_a_model_without_an_estimate(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
        result = call("plan", tmp_path, "--layout", "single")
        assert re.search(r"activations, 1 x 2,048 tokens +│ +not estimated", result.stdout)
        assert "here peaks are without them" in result.stdout

    def test_a_known_model_by_its_name_on_the_hub(self, monkeypatch):
        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)  # nothing is fetched
        assert model_from("Qwen/Qwen3-0.6B").config.hidden_size == known_configs()["qwen3-0.6b"]["hidden_size"]

    @pytest.mark.extended
    def test_a_trillion_weights_on_a_thousand_ranks(self):
        result = call("plan", "kimi-k2", "--ranks", 1024, "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert 1.0e12 < report["muon_weights"] < 1.03e12
        assert max(report["flops"]) * 1024 < 1.05 * sum(report["flops"])
        assert sum(report["flops"]) == plan_step(model_from("kimi-k2"), MuonConfig(), "single", 1).flops[0]
        assert sum(report["state_bytes"]) == pytest.approx(
            4 * report["muon_weights"] + 8 * report["adamw_weights"], rel=1e-3
        )

    @pytest.mark.parametrize("words", [["--batch-size", "0"], ["--sequence-length", "-1"], ["--memory", "0"]])
    def test_numbers_that_are_not_above_zero_are_refused(self, words):
        result = call("plan", "qwen3-0.6b", *words)
        assert result.exit_code == 2
        assert words[0] in result.stderr

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere"], "nowhere does not exist"),
            (["qwen3-0.6b", "--layout", "megatron"], "layout megatron is not valid. Valid: single, ddp"),
            (["qwen3-0.6b", "--layout", "fspd"], "layout fspd is not valid. Valid: single, ddp"),
            (["qwen3-0.6b", "--ranks", "0"], "0 ranks are not valid"),
            (["qwen3-0.6b", "--layout", "hsdp", "--replicas", "3"], "3 replicas do not divide 8 ranks"),
            (["qwen3-0.6b", "--dtype", "fp8"], "dtype: fp8 is not a dtype of trained weights. Valid: fp32, bf16, fp16"),
        ],
    )
    def test_refused(self, words, message):
        result = call("plan", *words)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert message in result.stderr
