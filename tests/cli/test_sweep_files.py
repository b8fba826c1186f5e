"""What a sweep reads and writes, and when two rates are too close to tell apart."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_muon.cli.sweep_files import default_command, trial_settings
from hf_muon.cli.sweep_scores import Trial, is_close, judge, read_losses, recommendation
from hf_muon.integrations.transformers.callback import append_to_trainer_log


class TestFiles:
    def test_default_commands(self):
        def command(**settings):
            return default_command(Path("a.yaml"), {"model_name_or_path": "m", **settings})

        assert command(stage="sft") == ["llamafactory-cli", "train", "{file}"]
        assert command(dataset_text_field="text") == ["trl", "sft", "--config", "{file}"]
        v1 = default_command(Path("a.yaml"), {"model": "m"})
        assert v1 == ["env", "USE_V1=1", "llamafactory-cli", "sft", "{file}"]

    def test_llamafactory_v1(self):
        settings = {"model": "m", "optim_config": {"name": "muon", "momentum": 0.9, "lr": 1e-5}, "save_steps": 5}
        common = {"model": "m", "learning_rate": 1e-3, "max_steps": 9, "output_dir": "out", "logging_steps": 1}
        muon = trial_settings(settings, "muon", 1e-3, 9, Path("out"))
        assert muon == {**common, "optim_config": {"name": "muon", "momentum": 0.9, "lr": 1e-3}}
        assert trial_settings(settings, "adamw", 1e-3, 9, Path("out")) == common

    def test_losses_of_each_kind_of_file(self, tmp_path):
        (tmp_path / "losses.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
        (tmp_path / "trainer_log.jsonl").write_text(
            '{"current_steps": 4, "loss": 2}\n{"current_steps": 4, "eval_loss": 3}\n'
        )
        entries = [
            {"step": 5, "loss": 1.0},
            {"step": 5, "eval_a_loss": 1.0},
            {"step": 5, "eval_b_loss": 2.0, "eval_a_loss": 1.0},
        ]
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
        losses, evaluation = read_losses(tmp_path / "losses.jsonl", tmp_path / "trainer_log.jsonl")
        assert losses[1] == 2.5
        assert math.isnan(losses[2])
        assert evaluation is None
        assert read_losses(tmp_path / "missing", tmp_path / "trainer_log.jsonl") == ({4: 2.0}, 3.0)
        assert read_losses(tmp_path / "trainer_state.json") == ({5: 1.0}, 1.5)

    def test_trainers_log_is_appended_by_the_first_rank(self, tmp_path, monkeypatch):
        file = tmp_path / "losses.jsonl"
        first, second = (SimpleNamespace(is_world_process_zero=first, global_step=3) for first in (True, False))
        append_to_trainer_log(first, {"loss": 1.0})
        assert not file.exists()
        monkeypatch.setenv("HF_MUON_TRAINER_LOG", str(file))
        append_to_trainer_log(first, {"loss": math.nan, "epoch": 0.5, "text": "words"})
        append_to_trainer_log(first, {"eval_loss": 1.5})
        append_to_trainer_log(second, {"loss": 7.0})
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [list(line) for line in lines] == [["step", "loss", "epoch"], ["step", "eval_loss"]]
        losses, evaluation = read_losses(file)
        assert math.isnan(losses[3])
        assert evaluation == 1.5


def trial(rate, gaps, steps=100):
    """Return a trial whose losses are those of a curve, and gaps above it."""
    return Trial("muon", rate, losses={k: 2 + 3 / k + gap for k, gap in enumerate(gaps, 1)}, steps=steps)


def drifting(generator, correlation, steps=100):
    """Return gaps of variance 1 that drift: each is the one before, times a correlation, and noise."""
    gaps = [generator.gauss(0, 1)]
    while len(gaps) < steps:
        gaps.append(correlation * gaps[-1] + math.sqrt(1 - correlation**2) * generator.gauss(0, 1))
    return gaps


class TestTooCloseToTell:
    @pytest.mark.parametrize(("correlation", "most"), [(0.0, 0.01), (0.5, 0.01), (0.8, 0.05), (0.95, 0.2)])
    def test_equal_rates_whose_gap_drifts(self, correlation, most):
        """Count how often noise is told apart; the standard error of independent steps would do so up to 79 %."""
        generator, level = random.Random(0), [0.0] * 100
        told = [not is_close(trial(1, drifting(generator, correlation)), trial(2, level)) for _ in range(500)]
        assert sum(told) / len(told) <= most

    @pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8, 0.95])
    def test_a_gap_of_several_times_its_swing_is_told(self, correlation):
        generator, level = random.Random(0), [0.0] * 100
        cases = [[5 + gap for gap in drifting(generator, correlation)] for _ in range(200)]
        assert sum(not is_close(trial(1, gaps), trial(2, level)) for gaps in cases) >= 195

    def test_few_steps_tell_nothing(self):
        trials = [trial(rate, [float(rate)] * 15, 15) for rate in (1, 2)]
        assert is_close(*trials)
        assert "; too close to tell from it: 2; but" in recommendation(trials)["text"]
        assert recommendation([trial(rate, [float(rate)] * 30, 30) for rate in (1, 2)])["close"] == []

    def test_the_sentence_names_the_lowest_loss_and_takes_no_rate(self):
        level = [0.0] * 100
        swinging = [0.1 * (-1) ** k for k in range(100)]
        near = [0.01 + gap for gap in swinging]
        text = recommendation([trial(0.5, [1.0] * 100), trial(1, level), trial(2, near)])["text"]
        assert text.startswith("Lowest loss: 2.031 at learning_rate 1, 1 below that at 0.5, 0.01 below that at 2; ")
        assert "too close to tell from it: 2; but short runs favour higher rates than long ones" in text


class TestStatus:
    def test_a_loss_that_rose(self):
        trial = Trial("muon", 1.0, losses={step: float(step) for step in range(1, 11)}, steps=10)
        judge(trial, 0, [])
        assert (trial.status, trial.reason) == ("finished", "the loss rose from 1")
        assert "but even here the loss rose from 1, " in recommendation([trial])["text"]

    def test_a_gradient_that_is_not_finite_diverges(self):
        trial = Trial("muon", 1.0, losses={1: 1.0}, steps=10)
        judge(trial, 1, ["RuntimeError: a.weight has a gradient that is not finite", "later words"])
        assert trial.status == "diverged"
        assert trial.reason == "step 2: RuntimeError: a.weight has a gradient that is not finite"

    @pytest.mark.parametrize(
        "lines",
        [
            ["INFO: non-finite values are skipped by the data loader", "OSError: No space left on device"],
            ["ValueError: learning_rate is not finite"],
            ["a gradient that is not finite will be skipped", "ConnectionError: hub"],
        ],
    )
    def test_other_errors_are_failures_whatever_lines_stand_before(self, lines):
        trial = Trial("muon", 1.0, losses={1: 1.0}, steps=10)
        judge(trial, 1, lines)
        assert (trial.status, trial.reason) == ("failed", f"exit status 1: {lines[-1]}")
