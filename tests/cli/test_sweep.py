"""`hf-muon sweep` with a command that trains nothing: its losses are a known function of the rate."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hf_muon.cli.app import app
from hf_muon.cli.sweep import read_losses, trial_settings

# Reads the training file and writes what Trainer writes. The loss is lowest at 1e-4, is NaN from step 7 on above 3e-3,
# and has a part that depends on the step alone, as a batch's. FAKE holds rates at which it fails.
PROGRAM = """
import json, math, os, pathlib, random, sys, time
run = json.loads(pathlib.Path(sys.argv[1]).read_text())
rate, steps, out = run["learning_rate"], run["max_steps"], pathlib.Path(run["output_dir"])
with open(os.environ["STARTS"], "a") as starts:
    starts.write(f"{rate:g}\\n")
if f"{rate:g}" in os.environ.get("FAKE", "").split():
    sys.exit(f"RuntimeError: out of memory at {rate:g} in {sys.argv[1]}")
if f"{rate:g}" == os.environ.get("HANG"):
    time.sleep(60)
batches = random.Random(0)
history = []
for step in range(1, steps + 1):
    loss = 3 + 2 / step + math.log10(rate / 1e-4) ** 2 + batches.gauss(0, .5)
    if rate > 3e-3 and step >= 7:
        loss = math.nan
    history.append({"step": step, "loss": loss, "learning_rate": rate})
if run.get("eval_strategy", "no") != "no":
    history.append({"step": run["eval_steps"], "eval_loss": 4 + math.log10(rate / 3e-4) ** 2})
folder = out / f"checkpoint-{run['save_steps']}"
folder.mkdir(parents=True)
(folder / "model.safetensors").write_text("weights")
(folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
"""
SETTINGS = {
    "model_name_or_path": "qwen3-0.6b",
    "learning_rate": 1e-4,
    "optim": "muon",
    "optim_args": "momentum=0.9",
    "save_steps": 5,
    "logging_steps": 10,
    "push_to_hub": True,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    (tmp_path / "program.py").write_text(PROGRAM)
    write(tmp_path)
    return tmp_path


def write(folder, **changes):
    settings = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
    (folder / "run.json").write_text(json.dumps(settings))


RATES = ("--rates", "1e-5,1e-4,1e-3")


def arguments(*options):
    return ["sweep", "run.json", "--steps", "30", *options, "--", sys.executable, "-S", "program.py", "{file}"]


def sweep(*options):
    return CliRunner().invoke(app, arguments(*options), env={"COLUMNS": "300"})


def starts():
    return Path(os.environ["STARTS"]).read_text().split()


def results(folder):
    """Return what a sweep has kept of each trial, without its time and the folder's name."""
    found = {}
    for file in sorted(folder.glob("*/result.json")):
        result = json.loads(file.read_text())
        found[result["rate"]] = (result["losses"], result["eval_loss"])
    return found


class TestResults:
    def test_the_rate_with_the_lowest_loss(self, folder):
        result = sweep("--rates", "1e-3,1e-5,1e-4,1e-2")
        assert result.exit_code == 0, result.output
        text = "at learning_rate 1e-4; but short runs favour higher rates than long ones, and this is one seed."
        assert text in result.output
        losses = results(folder / "run_sweep")
        assert sorted(losses) == [1e-5, 1e-4, 0.001, 0.01]
        differences = [losses[1e-3][0][step] - losses[1e-4][0][step] for step in losses[1e-4][0]]
        assert differences == [pytest.approx(1)] * 30
        assert math.isnan(losses[0.01][0]["7"])
        # The score is the mean of steps 28 to 30.
        score = sum(losses[1e-4][0][step] for step in ("28", "29", "30")) / 3
        assert f"Lowest loss: {score:.4g} at" in result.output
        page = (folder / "run_sweep" / "sweep.html").read_text()
        assert "Loss by learning rate" in page
        assert text in page
        assert "picture: run_sweep/sweep.html" in result.output

    def test_the_lowest_loss_at_an_edge_says_so(self, folder):
        assert "at learning_rate 1e-5; but no higher rate was tried, short runs" in sweep("--rates", "1e-6,1e-5").output

    def test_a_trial_is_the_users_file_with_few_changes(self, folder):
        write(folder, resume_from_checkpoint="out/checkpoint-4")
        assert sweep(*RATES).exit_code == 0
        assert json.loads((folder / "run_sweep" / "0.001" / "run.json").read_text()) == {
            "model_name_or_path": "qwen3-0.6b",
            "learning_rate": 1e-3,
            "optim": "muon",
            "optim_args": "momentum=0.9",
            "logging_steps": 1,
            "logging_strategy": "steps",
            "logging_nan_inf_filter": False,
            "push_to_hub": False,
            "max_steps": 30,
            "output_dir": str(folder / "run_sweep" / "0.001" / "output"),
            "save_strategy": "steps",
            "save_steps": 30,
            "save_only_model": True,
            "load_best_model_at_end": False,
            "report_to": "none",
        }
        left = [path.name for path in (folder / "run_sweep" / "0.001" / "output").rglob("*") if path.is_file()]
        assert left == ["trainer_state.json"]

    def test_llamafactory_v1(self):
        settings = {"model": "m", "optim_config": {"name": "muon", "momentum": 0.9, "lr": 1e-5}}
        changed = {"learning_rate": 1e-3, "max_steps": 9, "output_dir": "out", "logging_steps": 1}
        config = {"name": "muon", "momentum": 0.9, "lr": 1e-3}
        assert trial_settings(settings, 1e-3, 9, Path("out")) == {"model": "m", **changed, "optim_config": config}

    def test_evaluation_decides_if_the_run_evaluates(self, folder):
        write(folder, eval_strategy="epoch")
        assert "Lowest evaluation loss: 4 at learning_rate 3e-4;" in sweep("--rates", "1e-4,3e-4,1e-3").output

    def test_yaml(self, folder):
        (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
        program = PROGRAM.replace("json.loads(pathlib", "__import__('yaml').safe_load(pathlib")
        (folder / "program.py").write_text(program)
        command = [sys.executable, "program.py", "{file}"]
        result = CliRunner().invoke(app, ["sweep", "run.yaml", "--rates", "1e-4", "--steps", "30", "--", *command])
        assert result.exit_code == 0, result.output

    def test_losses_of_each_kind_of_file(self, tmp_path):
        """Read LLaMA-Factory's log, and then a state of Trainer beside it, whose last evaluation has two data sets."""
        lines = '{"current_steps": 4, "loss": 2}\n{"current_steps": 4, "eval_loss": 3}\n{"current_steps": 5}\n'
        (tmp_path / "trainer_log.jsonl").write_text(lines)
        assert read_losses(tmp_path) == ({4: 2.0}, 3.0)
        entries = [
            {"step": 5, "loss": 1.0},
            {"step": 5, "eval_a_loss": 9.0},
            {"step": 6, "eval_a_loss": 1.0},
            {"step": 6, "eval_b_loss": 2.0},
        ]
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
        assert read_losses(tmp_path) == ({5: 1.0}, 1.5)


class TestContinuing:
    def test_an_interrupted_sweep_ends_as_an_uninterrupted_one(self, folder):
        sweep(*RATES, "--out", "whole")
        whole = results(folder / "whole")
        (folder / "starts").unlink()
        environment = {**os.environ, "HANG": "0.001"}
        script = "from hf_muon.cli import main; main()"
        words = [sys.executable, "-c", script, *arguments(*RATES, "--out", "parts")]
        process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while not (folder / "starts").exists() or len(starts()) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert b"interrupted. Run the same command again to continue" in stderr
        assert b"Traceback" not in stderr
        assert sorted(results(folder / "parts")) == [1e-5, 1e-4]
        assert "1e-4: ended before, in parts/1e-4" in sweep(*RATES, "--out", "parts").output
        assert results(folder / "parts") == whole
        assert starts() == ["1e-05", "0.0001", "0.001", "0.001"]

    def test_a_finished_sweep_takes_further_rates_and_a_change_starts_anew(self, folder):
        sweep(*RATES)
        assert sweep(*RATES).exit_code == 0
        assert len(starts()) == 3
        sweep("--rates", "1e-4,3e-4")
        assert starts()[3:] == ["0.0003"]
        write(folder, weight_decay=0.1)
        sweep("--rates", "1e-4,3e-4")
        assert starts()[4:] == ["0.0001", "0.0003"]

    def test_a_failed_trial_is_run_again(self, folder, monkeypatch):
        monkeypatch.setenv("FAKE", "0.001")
        result = sweep(*RATES)
        assert result.exit_code == 0
        assert "exit status 1" in result.output
        monkeypatch.delenv("FAKE")
        sweep(*RATES)
        assert starts()[3:] == ["0.001"]


class TestRefusals:
    def test_a_command_that_fails_at_the_lowest_rate_ends_the_sweep(self, folder, monkeypatch):
        monkeypatch.setenv("FAKE", "1e-05")
        result = sweep(*RATES)
        assert result.exit_code == 1
        assert len(starts()) == 1
        assert "fails at the lowest rate, exit status 1: see run_sweep/1e-5/output.log" in result.output
        assert "out of memory" in (folder / "run_sweep" / "1e-5" / "output.log").read_text()

    def test_no_trial_finishes(self, folder):
        result = sweep("--rates", "1e-2,2e-2")
        assert result.exit_code == 1
        assert "No trial ended with a finite loss" in result.output

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"warmup_steps": 30}, "warmup_steps: 30 leaves no step at the full rate in trials of 30 steps"),
            ({"optim_args": "muon_lr=0.02"}, "muon_lr=0.02 is the rate of the Muon groups whatever learning_rate is"),
            ({"optim_args": "momentun=0.02"}, "momentun"),
            ({"fsdp": "full_shard", "fsdp_config": {"version": 1}}, "optim: muon would be refused: "),
            ({"stage": "ppo"}, "ppo maximizes a reward"),
            ({"model_name_or_path": None}, "names no model"),
        ],
    )
    def test_files(self, folder, changes, message):
        write(folder, **changes)
        result = sweep(*RATES)
        assert result.exit_code == 1
        assert message in result.output
        assert not (folder / "starts").exists()

    @pytest.mark.parametrize(
        ("words", "code", "message"),
        [
            (["run.json", "--rates", "1e-5,x", "--", "a", "{file}"], 2, "expected positive numbers"),
            (["run.json", "--rates", "-1e-5", "--", "a", "{file}"], 2, "expected positive numbers"),
            (["run.json", *RATES, "--steps", "0", "--", "a", "{file}"], 2, "Invalid value for '--steps'"),
            (["run.json", *RATES, "--", "python", "train.py"], 2, "has no {file}"),
            (["run.json", "--", "a", "{file}"], 2, "Missing option '--rates'"),
            (["run.json", *RATES], 2, "Missing argument '-- COMMAND'"),
            (["missing.yaml", *RATES, "--", "a", "{file}"], 1, "missing.yaml cannot be read"),
            (["run.json", *RATES, "--", "no-such-program", "{file}"], 1, "No such file or directory: 'no-such"),
            (["run.json", *RATES, "--out", "program.py", "--", "a", "{file}"], 1, "Not a directory"),
        ],
    )
    def test_usage(self, folder, words, code, message):
        result = CliRunner().invoke(app, ["sweep", *words], env={"COLUMNS": "300"})
        assert result.exit_code == code, result.output
        assert message in " ".join(result.output.split())
        assert "Traceback" not in result.output
