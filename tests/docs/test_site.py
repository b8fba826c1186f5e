"""The documentation builds without a warning: links lead somewhere, and every page stands in a table of contents."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.extended

pytest.importorskip("sphinx", reason="sphinx is not installed")


def test_every_page_is_built_and_a_link_that_leads_nowhere_is_the_only_warning(tmp_path):
    """Build a copy of the pages with a wrong link on one of them: warnings are seen, and there is no other."""
    for folder in ("docs", "benchmarks", "evidence"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for path in ROOT.glob("*.md"):
        shutil.copy(path, tmp_path / path.name)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write("\n[a page](missing.md)\n")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "docs", "site"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    warnings = [line for line in result.stderr.splitlines() if "WARNING" in line or "ERROR" in line]
    assert result.returncode
    assert len(warnings) == 1, result.stderr
    assert "missing.md" in warnings[0]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert "TrainingArguments" in (tmp_path / "site" / "quickstart.html").read_text(encoding="utf-8")
