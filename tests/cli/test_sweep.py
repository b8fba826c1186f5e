"""`hf-muon sweep` with a command that trains nothing: its losses are a known function of the rate."""

from __future__ import annotations

import json
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
from hf_muon.cli.sweep_scores import Trial
from hf_muon.cli.sweep_trials import last_lines, next_rate

# Reads the training file and writes what Trainer writes. The loss is lowest at 1e-4 (AdamW: 2e-4), is NaN from step 7
# on above 3e-3, and has a part that depends on the step alone, as a batch's. FAKE holds rates at which it fails.
PROGRAM = """
import json, math, os, pathlib, random, sys, time
run = json.loads(pathlib.Path(sys.argv[1]).read_text())
rate, steps, out = run["learning_rate"], run["max_steps"], pathlib.Path(run["output_dir"])
with open(os.environ["STARTS"], "a") as starts:
    starts.write(f"{run['optim']} {rate:g}\\n")
if f"{rate:g}" in os.environ.get("FAKE", "").split() or os.environ.get("FAKE") == "all":
    sys.exit(f"Traceback\\nRuntimeError: out of memory at {rate:g} in {sys.argv[1]}")
if f"{rate:g}" == os.environ.get("HANG"):
    time.sleep(60)
if os.environ.get("RANK", "0") != "0":
    sys.exit()
best = {"muon": 1e-4, "adamw_torch": 2e-4}[run['optim']]
batches = random.Random(0)
history = []
for step in range(1, steps + 1):
    loss = 3 + 2 / step + math.log10(rate / best) ** 2 + batches.gauss(0, .5)
    if rate > 3e-3 and step >= 7:
        loss = math.nan
    history.append({"step": step, "loss": loss, "learning_rate": rate})
if run.get("eval_strategy", "no") != "no":
    history.append({"step": run["eval_steps"], "eval_loss": 4 + math.log10(rate / 3e-4) ** 2})
out.mkdir(parents=True, exist_ok=True)
(out / "checkpoint-9").mkdir()
(out / "checkpoint-9" / "model.safetensors").write_text("weights")
(out / "model.safetensors").write_bytes(bytes(2_000_000))
(out / "trainer_state.json").write_text(json.dumps({"log_history": history}))
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


def arguments(*options):
    return ["sweep", "run.json", "--steps", "30", *options, "--", sys.executable, "-S", "program.py", "{file}"]


def sweep(*options):
    return CliRunner().invoke(app, arguments(*options))


def result_of(*options):
    result = sweep("--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def starts():
    return Path(os.environ["STARTS"]).read_text().split("\n")[:-1]


def rows(folder):
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    return [{key: value for key, value in trial.items() if key != "seconds"} for trial in trials]


RATES = ("--rates", "1e-5,1e-4,1e-3")


class TestResults:
    def test_the_rate_with_the_lowest_loss(self, folder):
        result = result_of(*RATES, "--adamw")
        assert result["recommendation"]["rate"] == 1e-4
        assert result["recommendation"]["edge"] is False
        assert result["recommendation"]["close"] == []
        losses = {(row["optimizer"], row["rate"]): row["loss"] for row in result["trials"]}
        assert set(losses) == {(name, rate) for name in ("muon", "adamw") for rate in (1e-5, 1e-4, 1e-3)}
        # The score is the mean of steps 28 to 30, whose batches are the same in all trials.
        difference = losses["muon", 1e-3] - losses["muon", 1e-4]
        assert difference == pytest.approx(1)
        text = result["recommendation"]["text"]
        assert text.startswith("Lowest loss: ")
        assert " at learning_rate 1e-4, 1 below" in text
        assert "1 below that at 1e-5, 1 below that at 0.001; but" in text
        assert "short runs favour higher rates than long ones, and this is one seed." in text
        adamw = losses["adamw", 1e-4]
        assert text.endswith(f"AdamW's lowest is {adamw:.4g} at 1e-4, 0.091 above Muon's.")

    def test_a_trial_is_the_users_file_with_few_changes(self, folder):
        result_of(*RATES, "--adamw")
        ours = json.loads((folder / "run_sweep" / "muon_0.001" / "run.json").read_text())
        theirs = json.loads((folder / "run_sweep" / "adamw_0.001" / "run.json").read_text())
        assert ours == {
            "model_name_or_path": "qwen3-0.6b",
            "learning_rate": 1e-3,
            "optim": "muon",
            "optim_args": "momentum=0.9",
            "logging_steps": 1,
            "logging_strategy": "steps",
            "logging_nan_inf_filter": False,
            "push_to_hub": False,
            "max_steps": 30,
            "output_dir": str(folder / "run_sweep" / "muon_0.001" / "output"),
            "save_strategy": "no",
            "load_best_model_at_end": False,
            "report_to": "none",
        }
        changed = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
        assert changed == {"optim", "optim_args", "output_dir"}
        assert theirs["optim"] == "adamw_torch"
        # Of the 2 MB and the checkpoint that a trial has written, small files stay.
        left = {path.name for path in (folder / "run_sweep" / "muon_0.001" / "output").iterdir()}
        assert left == {"trainer_state.json"}

    def test_the_table(self, folder):
        result = sweep("--rates", "1e-5,1e-4,1e-3,1e-2")
        assert result.exit_code == 0, result.output
        assert "diverged: the loss is nan at step 7" in result.output
        assert "at learning_rate 1e-4, 1 below that at 1e-5" in result.output
        assert "1 below that at 1e-5, 1 below that at 0.001; but" in result.output

    def test_evaluation_decides_if_the_run_evaluates(self, folder):
        write(folder, eval_strategy="epoch")
        result = result_of("--rates", "1e-4,3e-4,1e-3")
        assert result["score"] == "eval_loss"
        assert result["recommendation"]["rate"] == 3e-4
        assert result["recommendation"]["score"] == 4

    def test_yaml(self, folder):
        (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
        program = PROGRAM.replace("json.loads(pathlib", "__import__('yaml').safe_load(pathlib")
        (folder / "program.py").write_text(program)
        words = [
            "sweep",
            "run.yaml",
            "--no-extend",
            "--steps",
            "30",
            "--json",
            "--",
            sys.executable,
            "program.py",
            "{file}",
        ]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert [row["rate"] for row in json.loads(result.stdout)["trials"]] == [3e-5, 1e-4, 3e-4]

    def test_the_page_has_both_charts(self, folder):
        assert "picture: run_sweep/sweep.html" in sweep(*RATES, "--adamw").output
        page = (folder / "run_sweep" / "sweep.html").read_text()
        assert "Loss by learning rate" in page
        assert "Loss of each trial" in page
        assert "at learning_rate 1e-4, 1 below that at 1e-5" in page

    def test_a_neighbour_that_diverged(self, folder):
        text = result_of("--rates", "1e-5,1e-4,1e-2")["recommendation"]["text"]
        assert ", 1 below that at 1e-5, 0.01 diverged; but short runs" in text


class TestMoreRates:
    def test_the_best_rate_at_an_edge_gets_a_neighbour(self, folder):
        result = sweep("--rates", "1e-6,1e-5,3e-5")
        assert "3e-5 is the best rate and the highest of these: 9e-5 is tried, too" in result.output
        assert "9e-5 is the best rate and the highest of these: 3e-4 is tried, too" in result.output
        assert starts() == ["muon 1e-06", "muon 1e-05", "muon 3e-05", "muon 9e-05", "muon 0.0003"]
        assert "at learning_rate 9e-5" in result.output

    def test_at_most_two_and_the_sentence_says_so(self, folder):
        text = result_of("--rates", "1e-7,2e-7")["recommendation"]["text"]
        assert starts() == ["muon 1e-07", "muon 2e-07", "muon 4e-07", "muon 8e-07"]
        assert "but no higher rate was tried, short runs favour" in text

    def test_switched_off(self, folder):
        result = result_of("--rates", "1e-6,1e-5", "--no-extend")
        assert len(starts()) == 2
        assert result["recommendation"]["edge"] is True

    @pytest.mark.parametrize(
        ("losses", "rate"),
        [
            ({1.0: 3, 2.0: 2, 4.0: 3}, None),
            ({1.0: 1, 2.0: 2, 4.0: 3}, 0.5),
            ({1.0: 3, 2.0: 2, 4.0: 1}, 8),
            ({1.0: 3, 1.2: 2}, 1.44),
            ({1.0: 3}, 3),
        ],
    )
    def test_which_rate(self, losses, rate):
        trials = [Trial("muon", key, losses={10: loss}, steps=10) for key, loss in losses.items()]
        assert (next_rate(trials, list(losses), extend=True) or (None,))[0] == rate


class TestContinuing:
    def test_an_interrupted_sweep_ends_as_an_uninterrupted_one(self, folder):
        options = ("--rates", "1e-6,1e-5,3e-5", "--adamw")
        result_of(*options, "--out", "whole")
        whole, ran = rows(folder / "whole"), starts()
        (folder / "starts").unlink()
        environment = {**os.environ, "HANG": "3e-05"}
        script = "from hf_muon.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments(*options, "--out", "parts")],
            env=environment,
            stderr=subprocess.PIPE,
        )
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
        assert rows(folder / "parts") == whole[:2]
        result = sweep(*options, "--out", "parts")
        assert "continued, without Muon at 1e-6, Muon at 1e-5, which ended before" in result.output
        assert rows(folder / "parts") == whole
        assert starts() == [*ran[:3], *ran[2:]]

    def test_a_finished_sweep_runs_nothing_and_takes_further_rates(self, folder):
        first = result_of(*RATES)
        assert result_of(*RATES) == first
        assert len(starts()) == 3
        assert len(result_of("--rates", "1e-4,3e-4")["trials"]) == 4
        assert starts()[3:] == ["muon 0.0003"]

    def test_a_failed_trial_is_run_again(self, folder, monkeypatch):
        monkeypatch.setenv("FAKE", "0.001")
        result = result_of(*RATES)
        assert [row["status"] for row in result["trials"]] == ["finished", "finished", "failed"]
        assert "RuntimeError: out of memory" in result["trials"][2]["reason"]
        monkeypatch.delenv("FAKE")
        assert [row["status"] for row in result_of(*RATES)["trials"]] == ["finished"] * 3
        assert starts()[3:] == ["muon 0.001"]

    def test_a_change_is_refused(self, folder):
        sweep(*RATES)
        write(folder, weight_decay=0.1)
        result = sweep(*RATES)
        assert result.exit_code == 1
        assert "not comparable with these: weight_decay was None, and is 0.1. Name another folder" in result.output
        write(folder)
        result = sweep(*RATES, "--steps", "40")
        assert "steps was 30, and is 40;" in result.output or "steps was 30, and is 40." in result.output
        assert len(starts()) == 3

    def test_two_at_a_time_are_refused(self, folder):
        from hf_muon.cli.sweep_trials import locked

        with locked(folder / "run_sweep"):
            result = sweep(*RATES)
        assert result.exit_code == 1
        assert "run_sweep is in use" in result.output


class TestRefusals:
    def test_a_command_that_fails_at_once_is_stopped_after_two_trials(self, folder, monkeypatch):
        monkeypatch.setenv("FAKE", "all")
        result = sweep(*RATES)
        assert result.exit_code == 1
        assert len(starts()) == 2
        assert "the command fails at once, with Muon at 1e-5 and with Muon at 1e-4: exit status 1" in result.output
        assert "run_sweep/muon_1e-4/output.log" in result.output
        assert "  Traceback" in result.output

    def test_of_ranks_that_fail_the_reason_is_theirs_and_not_the_launchers(self, folder, monkeypatch):
        monkeypatch.setenv("FAKE", "0.001")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = ["sweep", "run.json", "--steps", "30", "--rates", "1e-4,1e-3", "--no-extend", "--json", "--"]
        result = CliRunner().invoke(app, [*words, *launcher, "program.py", "{file}"])
        fine, failed = json.loads(result.stdout)["trials"]
        assert (fine["status"], len(fine["losses"]), failed["status"]) == ("finished", 30, "failed")
        assert failed["reason"].startswith("exit status 1: RuntimeError: out of memory at 0.001 in")
        starts = Path("starts").read_text().splitlines()
        assert starts.count("muon 0.0001") == 2
        assert starts.count("muon 0.001") in (1, 2)  # the launcher ends the other rank, maybe before it has started
        assert set(starts) == {"muon 0.0001", "muon 0.001"}

    def test_the_reason_stands_above_what_accelerate_says(self, tmp_path):
        own = ["Traceback (most recent call last):", '  File "train.py", line 1', "RuntimeError: out of memory"]
        said = [
            own[0],
            '  File "x/accelerate/commands/launch.py", line 9',
            "subprocess.CalledProcessError: exit status 1.",
        ]
        (tmp_path / "log").write_text("\n".join([*own, *said]))
        assert last_lines(tmp_path / "log") == own
        (tmp_path / "log").write_text("\n".join(said))
        assert last_lines(tmp_path / "log") == said

    def test_no_trial_finishes(self, folder):
        result = sweep("--rates", "1e-2,2e-2")
        assert result.exit_code == 1
        assert "No trial with Muon finished" in result.output

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"warmup_steps": 30}, "warmup_steps: 30 leaves no step at the full rate in trials of 30 steps"),
            ({"optim_args": "muon_lr=0.02"}, "muon_lr=0.02 is the rate of the Muon groups whatever learning_rate is"),
            ({"optim_args": "momentun=0.02"}, "momentun"),
            ({"resume_from_checkpoint": "out/checkpoint-4"}, "resume_from_checkpoint: out/checkpoint-4 brings"),
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
            (["run.json", "--steps", "0", "--", "a", "{file}"], 2, "Invalid value for '--steps'"),
            (["run.json", "--", "python", "train.py"], 2, "has no {file}"),
            (["run.json"], 1, "does not tell which program reads it"),
            (["missing.yaml", "--", "a", "{file}"], 1, "missing.yaml cannot be read"),
            (["run.json", "--", "no-such-program", "{file}"], 1, "no-such-program cannot be run: No such file"),
            (["run.json", "--out", "program.py", "--", "a", "{file}"], 1, "--out program.py is not a directory"),
            (["run.json", "--out", ".", "--", "a", "{file}"], 1, "is not empty, and holds no sweep"),
        ],
    )
    def test_usage(self, folder, words, code, message):
        result = CliRunner().invoke(app, ["sweep", *words], env={"COLUMNS": "300"})
        assert result.exit_code == code, result.output
        assert message in " ".join(result.output.split())
        assert "Traceback" not in result.output
