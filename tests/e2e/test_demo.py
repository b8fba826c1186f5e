"""The demo, interrupted, goes on from its last whole checkpoint and reuses what has finished.

A short script stands in for the training; `test_llamafactory.py` resumes real runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    assert "run it again and it resumes from here" in result.stderr
    for state in ("done", "reused"):
        result = demo(tmp_path)
        assert result.returncode == 0, result.stderr
        line, loss = result.stdout.splitlines()
        assert line == f"Muon   [{'#' * 20}]    4/4 loss 1.000  {state}, messages in runs/muon/output.log"
        assert loss == "2.5"
    assert (tmp_path / "runs/muon/output.log").read_text() == "began after 0\nbegan after 2\n"
    assert [path.name for path in (tmp_path / "runs/muon").glob("checkpoint-*")] == ["checkpoint-2"]
