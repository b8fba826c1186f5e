"""The comparison with tests/golden fails where it must, and each file there is compared with something."""

from __future__ import annotations

import fnmatch
import re

from tests.support.snapshots import FOLDER, difference, write
from tests.support.zoo import ZOO


def test_each_file_is_compared_with_something():
    sources = "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.rglob("test_*.py"))
    calls = {re.sub(r"\{.*?\}", "*", name) for name in re.findall(r'\bgolden\(\s*f?"(\w[^"]*)"', sources)}
    stems = {path.relative_to(FOLDER).as_posix().split(".")[0] for path in FOLDER.rglob("*.txt")}
    routes = {f"routes/{name}" for name in ZOO}
    assert {name for name in stems if name.startswith("routes/")} == routes
    assert [name for name in sorted(stems - routes) if not any(fnmatch.fnmatch(name, call) for call in calls)] == []


def test_a_text_that_differs_is_shown(tmp_path):
    path = tmp_path / "page.txt"
    assert "run make golden" in difference(path, "", older=False)  # there is no file
    write(path, "one\ntwo\n", older=False)
    assert difference(path, "one\ntwo\n", older=False) == ""
    assert "\n one\n-two\n+2\n" in difference(path, "one\n2\n", older=False)
