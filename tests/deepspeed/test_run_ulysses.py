"""`scripts/run_ulysses.sh` with the example as it is but for a tiny model, little text, few steps and the CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests import fixtures_text
from tests.e2e.harness import MARK, ROOT, YAML, interrupt, options, run, weights

SCRIPT = ROOT / "scripts" / "run_ulysses.sh"
CONFIG = YAML / "trainer_qwen3_ulysses.yaml"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Return settings that make the example small: 10 pairs to learn, an epoch of 10 steps, and one pair held out."""
    folder = tmp_path_factory.mktemp("small")
    pairs = [{"prompt": f"What is {name}?\n", "text": text[:160]} for name, text in fixtures_text.documents()[:11]]
    fixtures_text.write_jsonl(folder / "pairs.jsonl", pairs)
    return {
        "model_name_or_path": fixtures_text.build_model_folder(folder / "model"),
        "data_path": folder / "pairs.jsonl",
        "attn_implementation": "sdpa",
        "block_size": 64,
        "deepspeed": ROOT / "examples" / "deepspeed" / "zero2.json",
        "use_cpu": True,
        "bf16": False,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "max_steps": 15,
        "save_steps": 13,  # in the second epoch, and between the two ranks' batches
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }


def launch(settings, output, cwd, *flags, fails=False, **variables):
    words = ["bash", SCRIPT, "--config", CONFIG, *flags, "--", *options({**settings, "output_dir": output})]
    variables = {"TORCHDYNAMO_DISABLE": "1", "PYTHON": sys.executable, **variables}
    return run(words, cwd=cwd, fails=fails, **variables)


@pytest.fixture(scope="module")
def straight(settings, tmp_path_factory):
    """Return the output of an uninterrupted run, and its folder."""
    folder = tmp_path_factory.mktemp("straight")
    return launch(settings, folder / "straight", folder, NPROC="2"), folder / "straight"


def losses(folder):
    state = json.loads((folder / "checkpoint-15/trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry], state["log_history"]


@pytest.mark.slow
def test_trains_by_the_script(straight):
    _, folder = straight
    logged, _ = losses(folder)
    assert logged[-1]["loss"] < logged[0]["loss"]


@pytest.mark.slow
@pytest.mark.extended
def test_stops_and_resumes_to_the_same_weights(settings, straight, tmp_path):
    _, folder = straight
    interrupt(folder, after=13, destination=tmp_path / "resumed")
    launch(settings, tmp_path / "resumed", tmp_path, "--nproc", "2", "--sp-size", "2")
    logged, entries = losses(tmp_path / "resumed")
    assert any(MARK in entry for entry in entries)
    assert logged == losses(folder)[0]
    here, there = weights(tmp_path / "resumed"), weights(folder)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in there)


@pytest.mark.slow
@pytest.mark.extended
def test_the_run_refuses_what_cannot_work(settings, tmp_path):
    words = {**settings, "save_strategy": "no", "eval_strategy": "no"}
    printed = launch(words, tmp_path / "out", tmp_path, "--nproc", "3", fails=True)
    assert "Attention head count 4 is not divisible by SP size 3" in printed
