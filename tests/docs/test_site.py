"""The documentation builds without a warning: links lead somewhere, and every page stands in a table of contents."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("sphinx", reason="sphinx is not installed")


def build(docs, target):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", docs, target]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_builds_without_a_warning(tmp_path):
    result = build(ROOT / "docs", tmp_path)
    assert result.returncode == 0, result.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in tmp_path.glob("*.html")}
    assert "TrainingArguments" in (tmp_path / "quickstart.html").read_text(encoding="utf-8")


@pytest.mark.extended
def test_a_link_that_leads_nowhere_is_an_error(tmp_path):
    for folder in ("docs", "benchmarks", "evidence"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for path in ROOT.glob("*.md"):
        shutil.copy(path, tmp_path / path.name)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write("\n[a page](missing.md)\n")
    result = build(tmp_path / "docs", tmp_path / "site")
    assert result.returncode
    assert "missing.md" in result.stderr
