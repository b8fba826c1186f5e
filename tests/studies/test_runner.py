"""A study that is interrupted ends with the rows of one that is not, and rows that are there stay."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import evidence.__main__
import evidence.processes
from evidence.agenda import searches
from evidence.corpus import PARTS, write_corpus
from evidence.processes import source
from evidence.results import DONE, FAILED, MEASURED, read_rows, write_rows
from evidence.runner import drop_failed
from evidence.study import FINAL, TUNE, Study
from tests.studies.quick_study import CONTENT, run
from tests.studies.quick_trial import BEST

ROOT = Path(__file__).parents[2]


def repeated(path):
    """Return the rows without what is measured."""
    rows = [{key: value for key, value in row.items() if key not in MEASURED} for row in read_rows(path).values()]
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the CSV file of the small study, run without an interruption."""
    out = tmp_path_factory.mktemp("whole")
    assert run(out, 2)
    return out / "quick.csv"


@pytest.fixture
def kill(tmp_path, monkeypatch):
    """Return a function that has a signal sent in the midst of a trial; see quick_trial.py."""

    def set_up(name, count):
        folder = tmp_path / f"{name}{count}"
        folder.mkdir()
        monkeypatch.setenv("KILL", f"{name} {count} {folder}")

    return set_up


def test_an_interrupted_study_ends_with_the_same_rows(whole, tmp_path, kill, monkeypatch):
    """Kill the runner in the midst of its fourth trial, end it in the third one after that, and run it to its end."""
    kill("SIGKILL", 3)
    process = subprocess.run([sys.executable, "-m", "tests.studies.quick_study", tmp_path, "1"], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(read_rows(tmp_path / "quick.csv")) == 3
    kill("SIGTERM", 2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 1)
    assert len(read_rows(tmp_path / "quick.csv")) == 5
    monkeypatch.delenv("KILL")
    assert run(tmp_path, 2)
    assert repeated(tmp_path / "quick.csv") == repeated(whole)


def test_rows_that_exist_are_not_trained_again_and_a_trial_that_is_killed_is(whole, tmp_path, kill):
    rows = {name: {**row, "date": "long ago"} for name, row in read_rows(whole).items()}
    write_rows(tmp_path / "quick.csv", list(rows.values())[1:])
    kill("SIGUSR1", 0)
    assert run(tmp_path, 2)
    assert repeated(tmp_path / "quick.csv") == repeated(whole)
    again = [row["id"] for row in read_rows(tmp_path / "quick.csv").values() if row["date"] != "long ago"]
    assert again == [min(rows)]


def test_grids_extend_until_the_best_is_inside_and_no_tuning_sees_the_test_part_or_a_final_seed(whole):
    study, rows = Study("quick", CONTENT), read_rows(whole)
    for cell in study.cells:
        by_side = searches(study, cell, rows)
        assert len({one.count for one in by_side.values()}) == 1
        for side, one in by_side.items():
            rates = sorted(trials[0].values["learning_rate"] for trials in one.trials.values())
            best = one.best.values["learning_rate"]
            assert rates[0] < best < rates[-1]
            assert 0.7 < best / BEST[side] < 1.4
    assert {(row["kind"], row["part"]) for row in rows.values()} == {(TUNE, "validation"), (FINAL, "test")}
    seeds = {kind: {row["seed"] for row in rows.values() if row["kind"] == kind} for kind in (FINAL, TUNE)}
    assert seeds == {FINAL: {"1", "2"}, TUNE: {"0", "100", "200"}}
    assert {row["source"] for row in rows.values()} == {source()}


def test_rows_of_other_settings_are_refused_and_failed_trials_stop_the_study(whole, tmp_path):
    file = tmp_path / "quick.csv"
    write_rows(file, read_rows(whole).values())
    with pytest.raises(ValueError, match=r"short/adamw.* other settings than the YAML file has"):
        run(tmp_path, 1, training={"warmup": 0.2})
    file.unlink()
    sides = {"muon": {"optim": "muon", "tune": {"learning_rate": {"start": 4.0, "factor": 2}}}}
    with pytest.raises(RuntimeError, match=r"2 trials failed, the last one with .*no such rate"):
        run(tmp_path, 1, sides=sides)
    assert {row["status"] for row in read_rows(file).values()} == {FAILED}
    assert drop_failed(file) == 2
    assert not read_rows(file)


@pytest.mark.slow
def test_a_study_trains_times_its_steps_and_draws_once(tmp_path, monkeypatch, capsys):
    """Run the command on a study of two trials, which Trainer trains in processes of their own, and run it again."""
    monkeypatch.setattr(evidence.processes, "BUILD", tmp_path / "build")
    texts = {part: [f"{part} {i} is a number" for i in range(60)] for part in PARTS}
    write_corpus(tmp_path / "text", {"docs": texts}, {}, vocab_size=270)
    sides = {"adamw": {"optim": "adamw_torch", "learning_rate": 0.01}, "muon": {"optim": "muon", "learning_rate": 0.01}}
    content = {**CONTENT, "sides": sides, "seeds": [1], "tune": {}, "cells": {"a": CONTENT["cells"]["short"]}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    folders = ["--folder", str(tmp_path), "--out", str(tmp_path / "out"), "--corpus", str(tmp_path / "text")]
    assert evidence.__main__.main(["run", "tiny", *folders]) == 0, capsys.readouterr().err
    rows = read_rows(tmp_path / "out" / "tiny.csv")
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, DONE)
    assert len(rows) == len(read_rows(tmp_path / "out" / "times.csv")) == 2
    files = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"tables.md", "tiny-curves.svg"} < {path.name for path in files}
    assert evidence.__main__.main(["run", "tiny", *folders]) == 0
    assert files == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
