"""`hf-muon sweep` with the Trainer script of the examples: its losses are those of runs that were started by hand."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from tests import fixtures_text
from tests.e2e.example_files import TRAIN, TRAINER
from tests.e2e.harness import BIN, TINY, YAML, python, read_yaml, run


@pytest.mark.slow
@pytest.mark.extended
def test_a_sweep_of_the_trainer_script(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("\n".join(fixtures_text.texts()[:9]), encoding="utf-8")
    settings = (
        read_yaml(YAML / TRAINER)
        | TINY
        | {
            "model_name_or_path": str(tiny_model),
            "data_path": str(tmp_path / "data"),
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "max_steps": 500,
        }
    )
    (tmp_path / "run.json").write_text(json.dumps(settings))
    command = [BIN / "hf-muon", "sweep", "run.json", "--steps", "10", "--rates", "1e-4,3e-3"]
    output = run([*command, "--", sys.executable, TRAIN, "{file}"], cwd=tmp_path)
    assert "Lowest evaluation loss: " in output
    assert " at learning_rate 0.003" in output

    # The same by hand, with a checkpoint, whose state holds the losses.
    by_hand = settings | {
        "learning_rate": 3e-3,
        "max_steps": 10,
        "save_steps": 10,
        "logging_steps": 1,
        "eval_steps": 10,
        "output_dir": str(tmp_path / "hand"),
    }
    (tmp_path / "hand.yaml").write_text(json.dumps(by_hand))
    python(TRAIN, "hand.yaml", cwd=tmp_path)
    state = json.loads((tmp_path / "hand" / "checkpoint-10" / "trainer_state.json").read_text())
    trial = json.loads((tmp_path / "run_sweep" / "0.003" / "result.json").read_text())
    assert trial["losses"] == {str(line["step"]): line["loss"] for line in state["log_history"] if "loss" in line}
    assert trial["eval_loss"] == statistics.fmean(
        line["eval_loss"] for line in state["log_history"] if "eval_loss" in line
    )
    assert not list((tmp_path / "run_sweep").rglob("*.safetensors"))
