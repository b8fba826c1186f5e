"""Tiny models and data for all processes of a test session, and the runs of Trainer in every layout."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import fixtures_text
from tests.e2e.harness import rounding_of_runs

if TYPE_CHECKING:
    from tests.e2e.layout_stages import Stages

PROGRAMS = ("timm", "sentence_transformers", "lightning", "ray")
collect_ignore = [] if any(map(importlib.util.find_spec, PROGRAMS)) else ["test_installed_programs.py"]
pytest.register_assert_rewrite("tests.e2e.layout_stages")


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


@pytest.fixture(scope="session")
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Return the starts of processes that run Trainer in every layout."""
    from tests.e2e.layout_stages import Stages

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the folder that all workers share
    # LLaMA-Factory's stack runs no further case, either.
    first = "not extended" in request.config.option.markexpr or importlib.util.find_spec("llamafactory") is not None
    return Stages(base / "layouts", first=first)


@pytest.fixture
def get(stages: Stages) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs the stage of a case, checks that the case raised no error, and returns its result."""
    from tests.e2e.layout_cases import STAGE_OF

    def result_of(name: str) -> dict[str, Any]:
        result = stages.result(STAGE_OF[name], name)
        assert "error" not in result, result["traceback"]
        return result

    return result_of
