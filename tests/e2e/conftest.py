"""Tiny models and data for all processes of a test session."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.harness import rounding_of_runs
from tests.support import fixtures_text

PROGRAMS = ("timm", "sentence_transformers", "lightning", "ray")
collect_ignore = [] if any(map(importlib.util.find_spec, PROGRAMS)) else ["test_installed_programs.py"]
pytest.register_assert_rewrite("tests.e2e.layout_cases")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Qwen3 with an output embedding of its own."""
    return fixtures_text.build_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def rounding(tiny_model: Path) -> dict[str, float]:
    """Return how far rounding moves the weights of a short run of the tiny model; see `harness.assert_close`."""
    return rounding_of_runs(tiny_model)


@pytest.fixture(scope="session")
def llamafactory_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return LLaMA-Factory's dataset_dir with tiny_sft and tiny_pt."""
    return fixtures_text.write_llamafactory_data(tmp_path_factory.mktemp("data"))
