"""`hf-muon sweep` with a command that trains nothing: its losses are a known function of the rate."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from hf_muon.cli.sweep import read_losses, trial_settings
from tests.cli.calls import call

# Reads the training file and writes what Trainer writes. The loss is lowest at 1e-4, is NaN from step 7 on above 3e-3,
# and has a part that depends on the step alone, as a batch's. FAIL is a rate at which it fails, and END one at which it
# ends the sweep as a scheduler does.
PROGRAM = """
import json, math, os, pathlib, random, signal, sys
run = json.loads(pathlib.Path(sys.argv[1]).read_text())
rate, steps, out = run["learning_rate"], run["max_steps"], pathlib.Path(run["output_dir"])
with open(os.environ["STARTS"], "a") as starts:
    starts.write(f"{rate:g}\\n")
if f"{rate:g}" == os.environ.get("FAIL"):
    sys.exit(f"RuntimeError: out of memory at {rate:g} in {sys.argv[1]}")
if f"{rate:g}" == os.environ.get("END"):
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
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
SETTINGS = {"model_name_or_path": "qwen3-0.6b", "learning_rate": 1e-4, "optim": "muon", "optim_args": "momentum=0.9"}
OTHERS = {"save_steps": 5, "logging_steps": 10, "push_to_hub": True}
RATES = ("--rates", "1e-5,1e-4,1e-3")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    (tmp_path / "program.py").write_text(PROGRAM)
    write(tmp_path)
    return tmp_path


def write(folder, **changes):
    (folder / "run.json").write_text(json.dumps({**SETTINGS, **OTHERS, **changes}))


def sweep(*options, **environment):
    words = ["--steps", "30", *options, "--", sys.executable, "-S", "program.py", "{file}"]
    return call("sweep", "run.json", *words, COLUMNS="300", **environment)


def starts():
    return Path(os.environ["STARTS"]).read_text().split()


def results(folder):
    """Return the losses of each trial that ended."""
    found = (json.loads(file.read_text()) for file in sorted(folder.glob("*/result.json")))
    return {result["rate"]: (result["losses"], result["eval_loss"]) for result in found}


@pytest.mark.promise("sweep")
def test_the_rate_with_the_lowest_loss(folder, golden):
    """Score a trial by the mean of its last tenth of steps, and say at an edge that no further rate was tried."""
    result = sweep("--rates", "1e-3,1e-5,1e-4,1e-2")
    at_the_edge = sweep("--rates", "1e-6,1e-5", "--out", "edge")
    golden("cli/sweep", result.output + at_the_edge.output)
    losses = results(folder / "run_sweep")
    assert sorted(losses) == [1e-5, 1e-4, 0.001, 0.01]
    differences = [losses[1e-3][0][step] - losses[1e-4][0][step] for step in losses[1e-4][0]]
    assert differences == [pytest.approx(1)] * 30
    assert math.isnan(losses[0.01][0]["7"])
    score = sum(losses[1e-4][0][step] for step in ("28", "29", "30")) / 3
    text = f"Lowest loss: {score:.4g} at learning_rate 1e-4; but short runs favour higher rates"
    assert text in result.output


def test_a_trial_is_the_users_file_with_few_changes(folder):
    write(folder, resume_from_checkpoint="out/checkpoint-4")
    assert sweep("--rates", "1e-3").exit_code == 0
    trial = folder / "run_sweep" / "0.001"
    assert json.loads((trial / "run.json").read_text()) == {
        **SETTINGS,
        "learning_rate": 1e-3,
        "max_steps": 30,
        "output_dir": str(trial / "output"),
        "logging_steps": 1,
        "logging_strategy": "steps",
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 30,
        "save_only_model": True,
        "load_best_model_at_end": False,
        "push_to_hub": False,
    }
    left = [path.name for path in (trial / "output").rglob("*") if path.is_file()]
    assert left == ["trainer_state.json"]
    v1 = {"model": "m", "save_steps": 2, "optim_config": {"name": "muon", "momentum": 0.9, "lr": 1e-5}}
    changed = {"learning_rate": 1e-3, "max_steps": 9, "output_dir": "out", "logging_steps": 1}
    config = {"name": "muon", "momentum": 0.9, "lr": 1e-3}
    assert trial_settings(v1, 1e-3, 9, Path("out")) == {"model": "m", **changed, "optim_config": config}
    # Trainer refuses to save the weights alone in shards, wherever FSDP is asked for.
    for own, command in ({"fsdp": "full_shard"}, []), ({}, ["accelerate", "launch", "--use_fsdp"]):
        assert trial_settings({**SETTINGS, **own}, 1e-3, 9, Path("out"), command)["save_only_model"] is False


def test_evaluation_decides_if_the_run_evaluates_and_a_file_may_be_yaml(folder):
    (folder / "run.yaml").write_text(yaml.safe_dump({**SETTINGS, "eval_strategy": "epoch"}))
    (folder / "program.py").write_text(PROGRAM.replace("json.loads(pathlib", "__import__('yaml').safe_load(pathlib"))
    words = ["--rates", "1e-4,3e-4,1e-3", "--steps", "30", "--", sys.executable, "program.py", "{file}"]
    assert "Lowest evaluation loss: 4 at learning_rate 3e-4;" in call("sweep", "run.yaml", *words, COLUMNS="300").output


def test_losses_of_each_kind_of_file(tmp_path):
    """Read LLaMA-Factory's log, and then a state of Trainer beside it, whose last evaluation has two data sets."""
    lines = '{"current_steps": 4, "loss": 2, "lr": 1e-05}\n{"current_steps": 4, "eval_loss": 3}\n{"current_steps": 5}\n'
    (tmp_path / "trainer_log.jsonl").write_text(lines)
    assert read_losses(tmp_path) == ({4: 2.0}, [1e-5], 3.0)
    first, second = {"step": 5, "loss": 1.0, "learning_rate": 1e-4}, {"step": 5, "eval_a_loss": 9.0}
    entries = [first, second, {"step": 6, "eval_a_loss": 1.0}, {"step": 6, "eval_b_loss": 2.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    assert read_losses(tmp_path) == ({5: 1.0}, [1e-4], 1.5)


@pytest.mark.promise("sweep")
def test_an_interrupted_sweep_ends_as_an_uninterrupted_one(folder):
    sweep(*RATES, "--out", "whole")
    (folder / "starts").unlink()
    result = sweep(*RATES, "--out", "parts", END="0.001")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "interrupted. Run the same command again to continue" in result.stderr
    assert sorted(results(folder / "parts")) == [1e-5, 1e-4]
    assert "1e-4: ended before, in parts/1e-4" in sweep(*RATES, "--out", "parts").output
    assert results(folder / "parts") == results(folder / "whole")
    assert starts() == ["1e-05", "0.0001", "0.001", "0.001"]


def test_a_sweep_runs_what_it_has_not(folder):
    """Run a trial that has failed, no rate twice, further rates, and all of them after a change of the file."""
    result = sweep(*RATES, FAIL="0.001")
    assert (result.exit_code, "exit status 1" in result.output) == (0, True)
    for words, expected in (RATES, ["0.001"]), (RATES, []), (("--rates", "1e-4,3e-4"), ["0.0003"]):
        (folder / "starts").write_text("")
        assert sweep(*words).exit_code == 0
        assert starts() == expected
    write(folder, weight_decay=0.1)
    sweep("--rates", "1e-4,3e-4")
    assert starts()[1:] == ["0.0001", "0.0003"]


def test_what_no_sweep_has_made_stays(folder):
    """Refuse a folder of the user before the first trial, and one with a file beside those of a trial."""
    mine = folder / "saves" / "0.001"
    mine.mkdir(parents=True)
    (mine / "output.log").write_text("weights of months")
    result = sweep(*RATES, "--out", "saves")
    assert (result.exit_code, list(folder.glob("starts"))) == (1, [])
    assert "saves/0.001 exists, no sweep has made" in result.stderr
    (mine / "output.log").unlink()
    assert sweep(*RATES, "--out", "saves").exit_code == 0
    (mine / "notes.txt").write_text("the best of them")
    write(folder, weight_decay=0.1)
    assert "saves/0.001 exists, no sweep has made" in sweep(*RATES, "--out", "saves").stderr
    assert (mine / "notes.txt").exists()
    assert len(starts()) == 3


@pytest.mark.parametrize(
    "history",
    [
        '{"step": 1, "loss": random.random(), "learning_rate": 3e-5}',  # as DeepSpeed's scheduler, on a GPU
        '{"step": 1, "loss": 2.0}',
    ],
)
def test_trials_that_are_one_run_are_not_compared(folder, history):
    (folder / "program.py").write_text(PROGRAM.replace("folder = out", f"history = [{history}]\nfolder = out"))
    result = sweep(*RATES)
    assert (result.exit_code, len(starts())) == (1, 2)
    assert "the trial at 1e-4 was the same run as one before" in result.stderr
    assert "[equal-trials]" in result.stderr


def test_two_sweeps_do_not_share_a_folder(folder):
    (folder / "run_sweep").mkdir()
    with FileLock(folder / "run_sweep" / ".lock"):
        result = sweep(*RATES)
    assert (result.exit_code, list(folder.glob("starts"))) == (1, [])
    assert "another sweep holds run_sweep/.lock. Wait for it, or name another folder with --out [folder-in-use]" in (
        result.stderr
    )
    assert sweep(*RATES).exit_code == 0


@pytest.mark.slow
def test_an_interruption_ends_what_the_command_has_started(folder):
    """Interrupt a sweep as a scheduler does, while its command waits for another process, as torchrun does."""
    os.mkfifo("alive")
    child = "import time; alive = open('alive', 'w'); time.sleep(60); alive.write('to the end')"
    (folder / "program.py").write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    words = ["run.json", "--rates", "1e-4", "--", sys.executable, "program.py", "{file}"]
    process = subprocess.Popen([Path(sys.executable).with_name("hf-muon"), "sweep", *words])
    with open("alive") as alive:
        process.terminate()
        assert process.wait(30) == 1
        assert alive.read() == ""


def test_a_command_that_fails_at_the_lowest_rate_ends_the_sweep_and_losses_that_are_all_nan_an_error(folder):
    result = sweep(*RATES, FAIL="1e-05")
    assert (result.exit_code, len(starts())) == (1, 1)
    assert "exit status 1: see run_sweep/1e-5/output.log [command-fails]" in result.stderr
    assert "out of memory" in (folder / "run_sweep" / "1e-5" / "output.log").read_text()
    result = sweep("--rates", "1e-2,2e-2")
    assert result.exit_code == 1
    assert "No trial ended with a finite loss" in result.output


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["run.json", "--rates", "1e-5,x", "--", "a", "{file}"], 2, "expected positive numbers"),
        (["run.json", "--rates", "-1e-5", "--", "a", "{file}"], 2, "expected positive numbers"),
        (["run.json", *RATES, "--steps", "0", "--", "a", "{file}"], 2, "Invalid value for '--steps'"),
        (["run.json", *RATES, "--", "python", "train.py"], 2, "has no {file}"),
        (["run.json", "--", "a", "{file}"], 2, "Missing option '--rates'"),
        (["run.json", *RATES], 2, "Missing argument '-- COMMAND'"),
        (["missing.yaml", *RATES, "--", "a", "{file}"], 1, "missing.yaml cannot be read"),
        (["run.json", *RATES, "--", "no-such-program", "{file}"], 1, "No such file or directory: 'no-such"),
        (["run.json", *RATES, "--out", "program.py", "--", "a", "{file}"], 1, "File exists: 'program.py'"),
    ],
)
def test_usage(folder, words, code, text):
    result = call("sweep", *words, COLUMNS="300")
    assert (result.exit_code, type(result.exception)) == (code, SystemExit)
    assert text in " ".join(result.output.split())
