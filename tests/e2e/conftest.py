"""A tiny model and tiny data, made once for all processes of a test session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fixtures_text
from tests.e2e.harness import rounding_of_runs


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with an output embedding of its own."""
    return fixtures_text.build_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def rounding(tiny_model: Path) -> dict[str, float]:
    """How far rounding takes the weights of a short run on the tiny model; see `harness.assert_close`."""
    return rounding_of_runs(tiny_model)


@pytest.fixture(scope="session")
def llamafactory_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaMA-Factory's dataset_dir with tiny_sft and tiny_pt."""
    return fixtures_text.write_llamafactory_data(tmp_path_factory.mktemp("data"))
