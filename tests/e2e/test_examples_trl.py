"""The example of TRL, run as it is but for a tiny model, tiny data, few steps and the CPU."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests import fixtures_text
from tests.e2e.example_files import ALL_MATRICES, ALL_OTHERS, TRL
from tests.e2e.harness import BIN, YAML, assert_routed, options, read_yaml, run


def trl_has_a_command_line() -> bool:
    """Return whether TRL is installed and imports under transformers 5, which version 1 is the first to do."""
    try:
        return int(importlib.metadata.version("trl").split(".")[0]) >= 1
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not trl_has_a_command_line(), reason="trl >= 1 is not installed")
def test_trl_sft(tiny_model: Path, tmp_path: Path) -> None:
    settings = {
        "model_name_or_path": tiny_model,
        "dataset_name": fixtures_text.write_messages(tmp_path / "data"),
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "use_cpu": True,
    }
    run([BIN / "trl", "sft", "--config", YAML / TRL, *options(settings)], cwd=tmp_path)
    saved = assert_routed(tmp_path / "out" / "checkpoint-2", muon=ALL_MATRICES, adamw=ALL_OTHERS, steps=2)
    assert {group["initial_lr"] for group in saved.groups} == {read_yaml(YAML / TRL)["learning_rate"]}
