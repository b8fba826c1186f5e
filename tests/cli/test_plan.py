"""`hf-muon plan` on checkpoints; tests/test_plan.py compares its numbers with measured steps."""

from __future__ import annotations

import json

import pytest
import torch

from hf_muon import MuonConfig, route_parameters
from hf_muon.plan import facts_of, numbers_of
from tests.cli.calls import call, report_of, transcript


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
