"""What a sweep reads and writes, and when two rates are as good as one another."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

from hf_muon.cli.sweep_files import default_command, trial_settings
from hf_muon.cli.sweep_scores import Trial, is_close, read_losses, recommendation
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


class TestNoise:
    """Two standard errors of paired differences, against numbers worked out by hand."""

    def trial(self, rate, *losses):
        # Steps 28 to 30 of 30 are the last tenth.
        return Trial(
            "muon",
            rate,
            losses={**dict.fromkeys(range(1, 28), 9.0), **dict(zip((28, 29, 30), losses, strict=True))},
            steps=30,
        )

    def test_differences_at_equal_steps(self):
        # Differences .1, .2, .3: mean .2, standard error .1 / sqrt(3), twice that .115.
        assert not is_close(self.trial(1e-5, 5, 1, 3), self.trial(1e-4, 4.9, 0.8, 2.7))
        # Differences .1, -.1, .3: mean .1, standard error .2 / sqrt(3), twice that .231.
        assert is_close(self.trial(1e-5, 5, 1, 3), self.trial(1e-4, 4.9, 1.1, 2.7))

    def test_nothing_is_significant(self):
        text = recommendation([self.trial(1e-5, 5, 1, 3), self.trial(1e-4, 4.9, 1.1, 2.7)])["text"]
        assert text.startswith(
            "No rate is significantly better than the others (within the noise of the batches); 1e-4"
        )

    def test_too_few_steps_to_know(self):
        trials = [Trial("muon", rate, losses={1: 3.0, 2: rate}, steps=2) for rate in (0.5, 0.6, 0.7)]
        assert "too few steps to know the noise of the batches" in recommendation(trials)["text"]

    def test_a_loss_that_rose(self):
        from hf_muon.cli.sweep_scores import judge

        trial = Trial("muon", 1.0, losses={step: float(step) for step in range(1, 11)}, steps=10)
        judge(trial, 0, [])
        assert (trial.status, trial.reason) == ("finished", "the loss rose from 1")
        assert "but even here the loss rose from 1, " in recommendation([trial])["text"]

    def test_a_gradient_that_is_not_finite_diverges(self):
        from hf_muon.cli.sweep_scores import judge

        trial = Trial("muon", 1.0, losses={1: 1.0}, steps=10)
        judge(trial, 1, ["RuntimeError: a.weight has a gradient that is not finite", "later words"])
        assert trial.status == "diverged"
        assert trial.reason == "step 2: RuntimeError: a.weight has a gradient that is not finite"
