"""Steps are timed in turn, and cells that are known are not measured again."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import evidence.__main__
import evidence.corpus
import evidence.processes
import evidence.time_steps
from evidence import times
from evidence.corpus import Corpus, write_corpus
from evidence.results import read_rows
from evidence.study import Study
from evidence.time_steps import steps_of
from evidence.times import FILE, measure, quicker, read_times
from tests.evidence.quick_study import CONTENT

PROGRAM = """
import json, sys
spec = json.loads(open(sys.argv[1]).read())["spec"]
if "muon" not in spec["sides"]:
    sys.exit("no such side")
json.dump({side: [2.0] * (spec["turns"] - spec["warm_up"]) for side in spec["sides"]}, open(sys.argv[2], "w"))
"""


class Stub:
    """A trainer whose step `i` takes `i` seconds by a clock by hand, times a factor, and is noted in a file."""

    def __init__(self, spec):
        self.spec = spec

    def add_callback(self, callback):
        self.callback = callback

    def train(self):
        clock = SimpleNamespace(now=0.0)
        evidence.time_steps.time = SimpleNamespace(process_time=lambda: clock.now)  # in the fork alone
        args = SimpleNamespace(max_steps=self.spec["steps"])
        self.callback.on_train_begin(args)
        for step in range(1, args.max_steps + 1):
            if step == self.spec.get("fails"):
                raise ValueError("the step fails")
            clock.now += self.spec["factor"] * step
            with self.spec["log"].open("a") as log:
                log.write(f"{self.spec['factor']}{step} ")
            self.callback.on_step_end(args, SimpleNamespace(global_step=step))


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(evidence.time_steps, "build_trainer", lambda spec, corpus, model: Stub(spec))
    monkeypatch.setattr(evidence.time_steps, "new_model", lambda *args: None)


def test_sides_take_turns_and_first_steps_do_not_count(stub, tmp_path):
    sides = {side: {"factor": factor, "log": tmp_path / "log"} for side, factor in (("a", 1), ("b", 3))}
    found = steps_of(sides, None, turns=4, warm_up=2)
    assert found == {"a": [3000.0, 4000.0], "b": [9000.0, 12000.0]}
    assert (tmp_path / "log").read_text().split() == ["11", "31", "32", "12", "13", "33", "34", "14"]


def test_a_side_that_fails_is_named(stub, tmp_path):
    sides = {side: {"factor": 1, "log": tmp_path / "log", "fails": fails} for side, fails in (("a", 9), ("b", 3))}
    with pytest.raises(RuntimeError, match="b has ended after 2 of 4 steps"):
        steps_of(sides, None, turns=4, warm_up=1)


def test_a_step_that_never_ends_is_named(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence.time_steps, "LONGEST", 0.2)
    monkeypatch.setattr(Stub, "train", lambda trainer: time.sleep(60))
    with pytest.raises(RuntimeError, match=r"a takes more than 0\.2 seconds for a step"):
        steps_of({"a": {}, "b": {}}, None, turns=2, warm_up=1)


def test_no_side_outlives_a_parent_that_is_killed(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(Stub, "train", endless)
    logs = [tmp_path / side for side in "abc"]
    job = ({log.name: {"log": log} for log in logs}, None, 10**6, 1)
    parent = multiprocessing.get_context("fork").Process(target=steps_of, args=job)
    parent.start()
    wait_until(lambda: all(log.is_file() and log.read_text() for log in logs))
    parent.kill()
    parent.join()
    numbers = [int(log.read_text()) for log in logs]
    try:
        wait_until(lambda: not any(map(runs, numbers)))
    finally:
        for number in filter(runs, numbers):
            os.kill(number, signal.SIGKILL)


def endless(trainer):
    """Write the number of this process and step whenever it is its turn."""
    trainer.spec["log"].write_text(str(os.getpid()))
    args = SimpleNamespace(max_steps=10**6)
    trainer.callback.on_train_begin(args)
    for step in itertools.count(1):
        time.sleep(0.01)
        trainer.callback.on_step_end(args, SimpleNamespace(global_step=step))


def runs(number):
    """Return whether a process runs; one that has ended may wait for its new parent."""
    status = Path(f"/proc/{number}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_real_steps_are_timed(tmp_path):
    words = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "xyzuvw")
    write_corpus(tmp_path / "text", {"docs": {"train": [words] * 3, "validation": [words]}}, {}, vocab_size=280)
    content = {**CONTENT, "sides": {"adamw": {"optim": "adamw_torch"}, "muon": {"optim": "muon"}}}
    study = Study("quick", {**content, "training": {"warmup": 0.1, "learning_rate": 0.01}})
    specs = {side: study.final("short", side, {}, 1).spec for side in study.sides}
    found = steps_of(specs, Corpus(tmp_path / "text"), turns=5, warm_up=2)
    assert set(found) == {"adamw", "muon"}
    assert all(len(steps) == 3 and min(steps) > 0 for steps in found.values())


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(times, "PROGRAM", [str(tmp_path / "program.py")])
    monkeypatch.setattr(evidence.processes, "BUILD", tmp_path / "build")


def test_cells_are_measured_once(program, tmp_path, capsys):
    study, corpus = Study("quick", CONTENT), SimpleNamespace(name="text", folder=tmp_path)
    measure(study, tmp_path, corpus, None)
    found = read_times(study, tmp_path)
    assert found == {
        (cell, side): [2.0] * (times.TURNS - times.WARM_UP) for cell in study.cells for side in study.sides
    }
    assert capsys.readouterr().out.count("a step of each side") == 2
    before = (tmp_path / FILE).read_bytes()
    measure(study, tmp_path, corpus, None)
    assert (tmp_path / FILE).read_bytes() == before
    assert not capsys.readouterr().out
    assert read_times(Study("other", CONTENT), tmp_path) == {}
    changed = {**CONTENT["cells"], "long": {**CONTENT["cells"]["long"], "batch": 4}}
    measure(Study("quick", {**CONTENT, "cells": changed}), tmp_path, corpus, None)
    assert "long" in (said := capsys.readouterr().out)
    assert "short" not in said
    assert {row["tokens_per_step"] for row in read_rows(tmp_path / FILE).values()} == {"16", "32"}


def test_a_process_that_fails_is_named(program, tmp_path):
    study = Study("quick", {**CONTENT, "sides": {"adamw": CONTENT["sides"]["adamw"]}})
    with pytest.raises(RuntimeError, match=r"steps of quick, short failed: see .*output\.log.*run the study again"):
        measure(study, tmp_path, SimpleNamespace(name="text", folder=tmp_path), None)
    assert not (tmp_path / FILE).is_file()


def test_studies_without_final_trials_have_no_times(program, tmp_path):
    measure(Study("quick", {**CONTENT, "seeds": []}), tmp_path, SimpleNamespace(name="text", folder=tmp_path), None)
    assert not (tmp_path / FILE).is_file()


def test_the_middle_turn_decides():
    assert quicker([1.0, 1.0, 1.0], [2.0, 9.0, 1.0]) == 2.0


@pytest.mark.parametrize("complete", [True, False])
def test_run_measures_complete_studies(complete, tmp_path, monkeypatch):
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(CONTENT))
    measured = []
    monkeypatch.setattr(evidence.corpus, "Corpus", lambda folder: None)
    monkeypatch.setattr(evidence.__main__, "Runner", lambda *args: SimpleNamespace(run=lambda: complete))
    monkeypatch.setattr(evidence.__main__, "measure", lambda study, *args: measured.append(study.name))
    folders = ["--folder", str(tmp_path), "--out", str(tmp_path), "--corpus", str(tmp_path)]
    assert evidence.__main__.main(["run", "quick", *folders]) == 0
    assert measured == ["quick"] * complete


def test_a_study_that_cannot_be_timed_keeps_no_other_from_its_tables(tmp_path, monkeypatch, capsys):
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(CONTENT))

    def fail(*args):
        raise RuntimeError("measuring failed")

    monkeypatch.setattr(evidence.corpus, "Corpus", lambda folder: None)
    monkeypatch.setattr(evidence.__main__, "Runner", lambda *args: SimpleNamespace(run=lambda: True))
    monkeypatch.setattr(evidence.__main__, "measure", fail)
    folders = ["--folder", str(tmp_path), "--out", str(tmp_path), "--corpus", str(tmp_path)]
    assert evidence.__main__.main(["run", "quick", *folders]) == 1
    assert "measuring failed" in capsys.readouterr().err
    assert (tmp_path / "tables.md").is_file()
