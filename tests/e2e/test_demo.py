"""The demo's line of progress, its log, and what it says where a run fails; a short script stands in for training."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
pytest.importorskip("yaml")
STEPS = 4
TRAINS = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
for step in range(1, {steps} + 1):
    print("many messages" * 9)
    line = {{"current_steps": step, "loss": 5 - step, "remaining_time": "0:00:09", "elapsed_time": "0:00:01"}}
    with (folder / "trainer_log.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\\n")
{end}
"""
FINISHES = (
    'for name, content in (("all_results", {"eval_loss": 2.5}), ("trainer_state", {"log_history": []})):\n'
    '    (folder / f"{name}.json").write_text(json.dumps(content))'
)
DRIVER = """
import os, sys
sys.path.insert(0, {demo!r})
import run
run.ROOT = run.BUILD = __import__("pathlib").Path({root!r})
run.CONFIGS = {{"muon": run.ROOT / "muon.yaml"}}
run.read_config = lambda name: {{"output_dir": "runs/muon", "max_steps": {steps}, "learning_rate": 1.0}}
run.train_command = lambda name: [sys.executable, "-c", {script!r}, str(run.ROOT / "runs/muon")]
run.POLL = 0.01
print(run.train("muon", "content", run.lock_build()).loss)
"""


def demo(tmp_path, end):
    script = TRAINS.format(steps=STEPS, end=end)
    code = DRIVER.format(demo=str(DEMO), root=str(tmp_path), steps=STEPS, script=script)
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


@pytest.mark.parametrize(
    "end", ["raise SystemExit('no memory left')", f"import os; os.kill(os.getpid(), {signal.SIGKILL})"]
)
def test_a_failure_shows_the_end_of_the_log(tmp_path, end):
    result = demo(tmp_path, end)
    assert result.returncode == 1
    assert "failed, messages in runs/muon/output.log" in result.stdout
    assert "failed with exit status " in result.stderr
    assert "The end of runs/muon/output.log:" in result.stderr
    assert "many messages" in result.stderr
    assert ("no memory left" in result.stderr) == ("memory" in end)
    assert "Traceback" not in result.stderr.partition("The end of")[2].replace("no memory left", "")


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
