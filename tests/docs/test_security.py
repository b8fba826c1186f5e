"""SECURITY.md names tests that exist, and README the packages that hooks patch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hf_muon._autoload import HOOKS

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("test", sorted(set(re.findall(r"`(tests/\S+::\w+)`", SECURITY))))
def test_every_test_of_the_threat_model_exists(test):
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_that_denies_something_names_a_test():
    rows = [line.split(" | ") for line in SECURITY.splitlines() if line.startswith("| ")][2:]
    assert rows
    assert [row[0] for row in rows if row[2].strip(" |") and "::" not in row[-1]] == []


def test_no_variable_names_code_or_a_path():
    """Expect that each variable of the package is one of those below: a switch, a number, or part of a name."""
    sources = [ROOT / "hf_muon_autoload.py", *(ROOT / "hf_muon").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    known = {
        "HF_MUON_AUTOLOAD",
        "HF_MUON_DIAGNOSTICS_EVERY",
        "HF_MUON_STEP_REPORT",
        "HF_MUON_DRY_RUN",
        "HF_MUON_DRY_RUN_WEIGHTS",
    }
    assert set(re.findall(r"HF_MUON_[A-Z_]+", text)) == known


def test_the_readme_names_every_package_that_hooks_patch():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## What does installing it do\?\n(.*?)^## ", readme, re.MULTILINE | re.DOTALL)[1].lower()
    packages = {hook.module.partition(".")[0].replace("llamafactory", "llama-factory") for hook in HOOKS.values()}
    assert [package for package in sorted(packages) if package not in section] == []
