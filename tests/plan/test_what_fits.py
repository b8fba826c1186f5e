"""The tables of docs/what-fits.md are those that benchmarks/what_fits.py computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.tiers import stack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("what_fits", ROOT / "benchmarks" / "what_fits.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def compare(script, names):
    page = script.PAGE.read_text(encoding="utf-8")
    for name, lines in script.tables(names).items():
        assert set(lines) <= set(script.written(page, name)), name


def test_the_page_has_the_tables_of_small_models(script):
    compare(script, ["qwen3-0.6b", "qwen3-4b"])


@pytest.mark.extended
@pytest.mark.skipif(stack() != "llamafactory", reason="the next test has the tables of all models")
def test_older_versions_give_the_table_of_experts(script):
    compare(script, ["qwen3-30b-a3b"])


@pytest.mark.extended
@pytest.mark.skipif(stack() == "llamafactory", reason="the other dense models differ in their sizes alone")
def test_the_page_has_all_tables(script):
    compare(script, list(script.MODELS))
    page = script.PAGE.read_text(encoding="utf-8")
    assert all(len(script.written(page, name)) == len(lines) for name, lines in script.tables(script.MODELS).items())
