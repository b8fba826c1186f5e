"""The examples of TRL, run as they are but for a tiny model, tiny data, few steps and the CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from tests import fixtures_text
from tests.e2e.example_files import ALL_MATRICES, ALL_OTHERS, TRL
from tests.e2e.harness import BIN, YAML, assert_routed, options, read_yaml, run, server

# Version 1 is the first that imports under transformers 5; `make test-versions` has older ones, too.
is_older = int(importlib.metadata.version("trl").partition(".")[0]) < 1 if importlib.util.find_spec("trl") else True
pytestmark = [
    pytest.mark.slow,
    pytest.mark.newest,
    pytest.mark.skipif(is_older, reason="trl >= 1 is not installed"),
]

REWARD = "def different_letters(completions, **_):\n    return [float(len(set(str(text)))) for text in completions]\n"
SMALLER = {  # settings of a stage that make its run small
    "sft": {},
    "dpo": {"max_length": 64},
    "grpo": {
        "reward_funcs": "rewards.different_letters",
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
    },
}


@pytest.mark.promise("trl")
@pytest.mark.first_tier("sft")
@pytest.mark.parametrize("stage", TRL)
def test_trl(stage: str, tiny_model: Path, tmp_path: Path) -> None:
    write = fixtures_text.write_messages if stage == "sft" else fixtures_text.write_preferences
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")
    settings = {
        "model_name_or_path": tiny_model,
        "dataset_name": write(tmp_path / "data"),
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "use_cpu": True,
        **SMALLER[stage],
    }
    words = ["--config", YAML / TRL[stage], *options(settings)]
    if stage == "dpo":
        run([BIN / "trl", stage, *words], cwd=tmp_path)  # the command, which launches the script
    else:
        spec = importlib.util.find_spec("trl")
        assert spec is not None
        assert spec.origin is not None
        server.run([Path(spec.origin).parent / "scripts" / f"{stage}.py", *words], cwd=tmp_path)
    saved = assert_routed(tmp_path / "out" / "checkpoint-2", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=2)
    assert {group["initial_lr"] for group in saved.groups} == {read_yaml(YAML / TRL[stage])["learning_rate"]}
