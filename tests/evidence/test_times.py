"""Steps are timed in turn, and cells that are known are not measured again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

import evidence.__main__
import evidence.corpus
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
    assert (tmp_path / "log").read_text().split() == ["11", "31", "12", "32", "13", "33", "14", "34"]


def test_a_side_that_fails_is_named(stub, tmp_path):
    sides = {side: {"factor": 1, "log": tmp_path / "log", "fails": fails} for side, fails in (("a", 9), ("b", 3))}
    with pytest.raises(RuntimeError, match="b has ended after 2 of 4 steps"):
        steps_of(sides, None, turns=4, warm_up=1)


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
    monkeypatch.setattr(times, "BUILD", tmp_path / "build")


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
    assert {row["tokens_per_step"] for row in read_rows(tmp_path / FILE).values()} == {"16"}


def test_a_process_that_fails_is_named(program, tmp_path):
    study = Study("quick", {**CONTENT, "sides": {"adamw": CONTENT["sides"]["adamw"]}})
    with pytest.raises(RuntimeError, match=r"measuring quick, short failed: see .*output\.log"):
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
