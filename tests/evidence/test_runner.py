"""A study that is interrupted, at any moment and however often, ends with the rows of one that is not."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from evidence.agenda import searches
from evidence.corpus import PARTS, write_corpus
from evidence.processes import source
from evidence.results import FAILED, MEASURED, read_rows, write_rows
from evidence.runner import drop_failed
from evidence.study import FINAL, TUNE, Study
from tests.evidence.quick_study import CONTENT, run
from tests.evidence.quick_trial import BEST

ROOT = Path(__file__).parents[2]


def repeated(path):
    """Return the rows without what is measured."""
    rows = [{key: value for key, value in row.items() if key not in MEASURED} for row in read_rows(path).values()]
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    return rows


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_an_interrupted_study_ends_with_the_same_rows(whole, tmp_path, number):
    random.seed(int(number))
    counts = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.evidence.quick_study", tmp_path, "1"], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        before = len(read_rows(tmp_path / "quick.csv"))
        while len(read_rows(tmp_path / "quick.csv")) < before + 2:  # then inside a trial, or between two
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.3))
        process.send_signal(number)
        process.wait()
        counts.append(len(read_rows(tmp_path / "quick.csv")))
    assert counts == sorted(set(counts))
    assert counts[-1] < len(repeated(whole))
    assert run(tmp_path, 2)
    assert repeated(tmp_path / "quick.csv") == repeated(whole)


def test_rows_that_exist_are_not_trained_again(whole, tmp_path):
    rows = {name: {**row, "date": "long ago"} for name, row in read_rows(whole).items()}
    _, *others = rows
    write_rows(tmp_path / "quick.csv", [rows[name] for name in others])
    run(tmp_path, 2)
    assert repeated(tmp_path / "quick.csv") == repeated(whole)
    again = [row["id"] for row in read_rows(tmp_path / "quick.csv").values() if row["date"] != "long ago"]
    assert again == [min(rows)]


def test_a_trial_that_is_killed_runs_again(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("KILLED_ONCE", str(tmp_path / "marker"))
    assert run(tmp_path, 2)
    assert (tmp_path / "marker").exists()
    assert repeated(tmp_path / "quick.csv") == repeated(whole)


@pytest.mark.slow
@pytest.mark.extended
def test_training_that_is_killed_ends_with_the_same_losses(tmp_path):
    """Train a few steps with Trainer in processes of their own, and kill the runner in the midst of one."""
    texts = {part: [f"{part} {i} is a number" for i in range(60)] for part in PARTS}
    write_corpus(tmp_path / "text", {"docs": texts}, {}, vocab_size=270)
    sides = {"adamw": {"optim": "adamw_torch", "learning_rate": 0.01}, "muon": {"optim": "muon", "learning_rate": 0.01}}
    content = {**CONTENT, "sides": sides, "seeds": [1], "tune": {}, "cells": {"a": {**CONTENT["cells"]["short"]}}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))

    def command(out):
        words = [sys.executable, "-W", "ignore", "-m", "evidence", "run", "tiny", "--folder", tmp_path]
        return [*words, "--out", tmp_path / out, "--corpus", tmp_path / "text"]

    subprocess.run(command("whole"), cwd=ROOT, check=True)
    process = subprocess.Popen(command("killed"), cwd=ROOT)
    while not read_rows(tmp_path / "killed" / "tiny.csv"):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    process.kill()
    process.wait()
    assert len(read_rows(tmp_path / "killed" / "tiny.csv")) == 1
    subprocess.run(command("killed"), cwd=ROOT, check=True)
    assert len(repeated(tmp_path / "whole" / "tiny.csv")) == 2
    assert repeated(tmp_path / "killed" / "tiny.csv") == repeated(tmp_path / "whole" / "tiny.csv")
    assert (tmp_path / "killed" / "tables.md").is_file()


def test_grids_extend_until_the_best_is_inside_and_trials_are_equal(whole):
    rows = read_rows(whole)
    study = Study("quick", CONTENT)
    for cell in study.cells:
        by_side = searches(study, cell, rows)
        assert len({one.count for one in by_side.values()}) == 1
        for side, one in by_side.items():
            rates = sorted(trials[0].values["learning_rate"] for trials in one.trials.values())
            best = one.best.values["learning_rate"]
            assert rates[0] < best < rates[-1]
            assert 0.7 < best / BEST[side] < 1.4
    tuning = [row for row in rows.values() if row["kind"] == TUNE]
    assert len([row for row in tuning if row["side"] == "muon"]) == len(tuning) / 2
    assert max(float(re.search("learning_rate=([^/]+)", row["id"])[1]) for row in tuning) > 16 * 0.008


def test_no_tuning_trial_sees_the_test_part(whole):
    parts = {(row["kind"], row["part"]) for row in read_rows(whole).values()}
    assert parts == {(TUNE, "validation"), (FINAL, "test")}
    seeds = {(row["kind"], row["seed"]) for row in read_rows(whole).values()}
    assert {seed for kind, seed in seeds if kind == FINAL} == {"1", "2"}
    assert {(TUNE, "0"), (TUNE, "100")} < seeds
    assert all(int(seed) % 100 == 0 for kind, seed in seeds if kind == TUNE)


def test_rows_name_the_source_of_the_optimizer(whole, tmp_path):
    assert {row["source"] for row in read_rows(whole).values()} == {source()}
    for name, text in (("a.py", "x = 1"), ("b/a.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = source(tmp_path)
    (tmp_path / "notes.txt").write_text("not source")
    assert source(tmp_path) == before
    (tmp_path / "b" / "a.py").write_text("x = 2")
    changed = source(tmp_path)
    (tmp_path / "b" / "a.py").rename(tmp_path / "b" / "c.py")
    assert len({before, changed, source(tmp_path)}) == 3


def test_rows_of_other_settings_are_refused(whole, tmp_path):
    write_rows(tmp_path / "quick.csv", read_rows(whole).values())
    with pytest.raises(ValueError, match=r"short/adamw.* other settings than the YAML file has: remove its rows"):
        run(tmp_path, 1, training={"warmup": 0.2})


def test_failed_trials_stop_the_study_and_are_in_the_file(tmp_path):
    sides = {"muon": {"optim": "muon", "tune": {"learning_rate": {"start": 4.0, "factor": 2}}}}
    with pytest.raises(RuntimeError, match=r"2 trials failed, the last one with .*no such rate"):
        run(tmp_path, 1, sides=sides)
    rows = read_rows(tmp_path / "quick.csv")
    assert {row["status"] for row in rows.values()} == {FAILED}
    assert drop_failed(tmp_path / "quick.csv") == len(rows) == 2
    assert not read_rows(tmp_path / "quick.csv")
