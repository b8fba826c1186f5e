"""Sides take steps in turn, and cells that are known are not measured again."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from types import SimpleNamespace

import pytest

import evidence.processes
import evidence.time_steps
from evidence import times
from evidence.results import read_rows
from evidence.study import Study
from evidence.time_steps import steps_of
from evidence.times import FILE, measure, quicker, read_times
from tests.studies.quick_study import CONTENT

PROGRAM = """
import json, sys
spec = json.loads(open(sys.argv[1]).read())["spec"]
if "muon" not in spec["sides"]:
    sys.exit("no such side")
json.dump({side: [2.0] * (spec["turns"] - spec["warm_up"]) for side in spec["sides"]}, open(sys.argv[2], "w"))
"""


class Stub:
    """A trainer that writes its name into a pipe at each step."""

    def __init__(self, spec):
        self.spec = spec

    def add_callback(self, callback):
        self.callback = callback

    def train(self):
        args = SimpleNamespace(max_steps=self.spec["steps"])
        self.callback.on_train_begin(args)
        for step in range(1, args.max_steps + 1):
            if step == self.spec.get("fails"):
                raise ValueError("the step fails")
            os.write(self.spec["to"], self.spec["name"].encode())
            self.callback.on_step_end(args, SimpleNamespace(global_step=step))


@pytest.fixture
def pipe(monkeypatch):
    """Return the ends of a pipe that steps write into."""
    monkeypatch.setattr(evidence.time_steps, "build_trainer", lambda spec, corpus, model: Stub(spec))
    monkeypatch.setattr(evidence.time_steps, "new_model", lambda *args: None)
    reads, writes = os.pipe()
    yield reads, writes
    os.close(reads)


def test_sides_take_turns_and_first_steps_do_not_count(pipe):
    found = steps_of({name: {"name": name, "to": pipe[1]} for name in "ab"}, None, turns=4, warm_up=2)
    assert os.read(pipe[0], 99) == b"abbaabba"
    assert [len(found[name]) for name in "ab"] == [2, 2]
    os.close(pipe[1])


def test_a_side_that_fails_or_never_ends_a_step_is_named(pipe, monkeypatch):
    sides = {name: {"name": name, "to": pipe[1], "fails": fails} for name, fails in (("a", 9), ("b", 3))}
    with pytest.raises(RuntimeError, match="b has ended after 2 of 4 steps"):
        steps_of(sides, None, turns=4, warm_up=1)
    monkeypatch.setattr(evidence.time_steps, "LONGEST", 0)
    monkeypatch.setattr(Stub, "train", lambda stub: signal.pause())
    with pytest.raises(RuntimeError, match="a takes more than 0 seconds for a step"):
        steps_of({"a": {}, "b": {}}, None, turns=2, warm_up=1)
    os.close(pipe[1])


def test_no_side_outlives_a_parent_that_is_killed(pipe):
    """Read a pipe that ends when its last writer has ended."""
    reads, writes = pipe
    sides = {name: {"name": name, "to": writes} for name in "abc"}
    parent = multiprocessing.get_context("fork").Process(target=steps_of, args=(sides, None, 10**6, 1))
    parent.start()
    os.close(writes)
    begun = set()
    while len(begun) < 3:
        begun |= set(os.read(reads, 1))
    parent.kill()
    parent.join()
    rest = b"more"
    while rest:
        assert select.select([reads], [], [], 60)[0], "a side still runs"
        rest = os.read(reads, 9999)


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(times, "PROGRAM", [str(tmp_path / "program.py")])
    monkeypatch.setattr(evidence.processes, "BUILD", tmp_path / "build")
    return SimpleNamespace(name="text", folder=tmp_path)


def test_cells_are_measured_once(program, tmp_path, capsys):
    study = Study("quick", CONTENT)
    measure(study, tmp_path, program, None)
    found = read_times(study, tmp_path)
    assert set(found) == {(cell, side) for cell in study.cells for side in study.sides}
    assert {tuple(steps) for steps in found.values()} == {(2.0,) * (times.TURNS - times.WARM_UP)}
    before = (tmp_path / FILE).read_bytes()
    capsys.readouterr()
    measure(study, tmp_path, program, None)
    assert ((tmp_path / FILE).read_bytes(), capsys.readouterr().out) == (before, "")
    assert read_times(Study("other", CONTENT), tmp_path) == {}
    changed = {**CONTENT["cells"], "long": {**CONTENT["cells"]["long"], "batch": 4}}
    measure(Study("quick", {**CONTENT, "cells": changed}), tmp_path, program, None)
    said = capsys.readouterr().out
    assert ("long" in said, "short" in said) == (True, False)
    assert {row["tokens_per_step"] for row in read_rows(tmp_path / FILE).values()} == {"16", "32"}


def test_a_process_that_fails_is_named_and_a_study_without_final_trials_has_no_times(program, tmp_path):
    study = Study("quick", {**CONTENT, "sides": {"adamw": CONTENT["sides"]["adamw"]}})
    with pytest.raises(RuntimeError, match=r"steps of quick, short failed: see .*output\.log"):
        measure(study, tmp_path, program, None)
    measure(Study("quick", {**CONTENT, "seeds": []}), tmp_path, program, None)
    assert not (tmp_path / FILE).is_file()
    assert quicker([1.0, 1.0, 1.0], [2.0, 9.0, 1.0]) == 2.0  # the middle turn decides
