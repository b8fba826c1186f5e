"""The demo: its line of progress and log, how it resumes, and what it says where a run fails.

A short script stands in for the training; `test_llamafactory.py` resumes real runs.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.newest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
STEPS = 4
FAILS = f"import os; os.kill(os.getpid(), {signal.SIGKILL})"
FINISHES = (
    'for name, content in (("all_results", {"eval_loss": 2.5}), ("trainer_state", {"log_history": []})):\n'
    '    (folder / f"{name}.json").write_text(json.dumps(content))'
)
# After step 3 of the first run the demo is interrupted; the training has one whole checkpoint, and one without its end.
INTERRUPTED = """
    if step == 2:
        (folder / "checkpoint-2").mkdir(exist_ok=True)
        (folder / "checkpoint-2" / "trainer_state.json").write_text("{}")
    if step == 3 and not first:
        (folder / "checkpoint-3").mkdir()
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
"""
TRAINS = """
import json, os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
first = max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)
print("began after", first, flush=True)
for step in range(first + 1, {steps} + 1):
    print("many messages" * 9)
    line = {{"current_steps": step, "loss": 5 - step, "remaining_time": "0:00:09", "elapsed_time": "0:00:01"}}
    with (folder / "trainer_log.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\\n")
{end}
"""
DRIVER = """
import sys
sys.path.insert(0, {demo!r})
import run
run.ROOT = run.BUILD = __import__("pathlib").Path({root!r})
run.CONFIGS = {{"muon": run.ROOT / "muon.yaml"}}
run.read_config = lambda name: {{"output_dir": "runs/muon", "max_steps": {steps}, "learning_rate": 1.0}}
run.train_command = lambda name: [sys.executable, "-c", {script!r}, str(run.ROOT / "runs/muon")]
run.prepare = lambda: {{"content": "content", "parameters": 1}}
run.draw = lambda *args: None
run.report = lambda results, parameters: print(results["muon"].loss)
run.POLL = 0.01
run.main()
"""


def demo(folder, end):
    script = TRAINS.format(steps=STEPS, end=end)
    code = DRIVER.format(demo=str(DEMO), root=str(folder), steps=STEPS, script=script)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_one_line_and_all_messages_in_the_file_it_names(tmp_path):
    result = demo(tmp_path, FINISHES)
    assert result.returncode == 0, result.stderr
    line, loss = result.stdout.splitlines()
    assert line == f"Muon   [{'#' * 20}]    {STEPS}/{STEPS} loss 1.000  done, messages in runs/muon/output.log"
    assert loss == "2.5"
    assert (tmp_path / "runs/muon/output.log").read_text().count("many messages") == 9 * STEPS
    line, loss = demo(tmp_path, FINISHES).stdout.splitlines()
    assert "reused" in line
    assert loss == "2.5"


@pytest.mark.promise("demo-resumes")
def test_an_interrupted_run_resumes_from_its_last_whole_checkpoint(tmp_path):
    result = demo(tmp_path, INTERRUPTED + FINISHES)
    assert result.returncode == 130, result.stderr
    assert "3/4 loss 2.000  interrupted" in result.stdout
    assert "run it again and it resumes from here" in result.stderr
    result = demo(tmp_path, INTERRUPTED.replace("not first", "False") + FINISHES)
    assert result.returncode == 0, result.stderr
    assert "4/4 loss 1.000  done" in result.stdout
    began = [line for line in (tmp_path / "runs/muon/output.log").read_text().splitlines() if "began" in line]
    assert began == ["began after 0", "began after 2"]
    assert [path.name for path in (tmp_path / "runs/muon").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("end", ["raise SystemExit('no memory left')", FAILS])
def test_a_failure_shows_the_end_of_the_log(tmp_path, end):
    result = demo(tmp_path, end)
    assert result.returncode == 1
    assert "failed, messages in runs/muon/output.log" in result.stdout
    assert "failed with exit status " in result.stderr
    log = result.stderr.partition("The end of runs/muon/output.log:")[2]
    assert "many messages" in log
    assert ("no memory left" in log) == ("memory" in end)
    assert "Traceback" not in log


def test_a_run_without_an_evaluation_is_no_success(tmp_path):
    result = demo(tmp_path, "pass")
    assert result.returncode == 1
    assert "has no eval_loss" in result.stderr


def test_lines_that_were_written_over_show_their_last_state(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(DEMO)!r}); import run; print(run.last_lines(run.Path(sys.argv[1])))"
    log = tmp_path / "log"
    log.write_bytes(b"first\n" * 30 + b"10%\r20%\r30%\r\nlast\n")
    result = subprocess.run([sys.executable, "-c", code, log], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["first"] * 18 + ["30%", "last"]
