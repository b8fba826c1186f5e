"""The comparison with tests/golden fails where it must, and each file there is compared with something."""

from __future__ import annotations

import fnmatch
import re

from tests.support.snapshots import FOLDER, clean, difference, write
from tests.support.zoo import ZOO


def test_each_file_is_compared_with_something():
    sources = "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.rglob("test_*.py"))
    calls = {re.sub(r"\{.*?\}", "*", name) for name in re.findall(r'\bgolden\(\s*f?"(\w[^"]*)"', sources)}
    stems = {path.relative_to(FOLDER).as_posix().split(".")[0] for path in FOLDER.rglob("*.txt")}
    routes = {f"routes/{name}" for name in ZOO}
    assert {name for name in stems if name.startswith("routes/")} == routes
    assert [name for name in sorted(stems - routes) if not any(fnmatch.fnmatch(name, call) for call in calls)] == []


def test_a_difference_is_shown_and_another_transformers_has_a_file_only_where_it_differs(tmp_path):
    path, own = tmp_path / "folder" / "page.txt", tmp_path / "folder" / "page.llamafactory.txt"
    assert "run make golden" in difference(path, "", older=False)
    write(path, "one\ntwo\n", older=False)
    assert difference(path, "one\ntwo\n", older=False) == ""
    shown = difference(path, "one\n2\n", older=False)
    assert "\n one\n-two\n+2\n" in shown
    assert "run make golden and look at the diff" in shown
    write(path, "old\n", older=True)
    assert (path.read_text(), own.read_text()) == ("one\ntwo\n", "old\n")
    assert difference(path, "old\n", older=False)
    assert not difference(path, "old\n", older=True)
    write(path, "one\ntwo\n", older=True)
    assert not own.exists()


def test_texts_are_the_same_on_each_machine():
    names = {"TMP": "/tmp", "FILE": "/tmp/a/b.txt"}
    assert clean("read /tmp/a/b.txt, /tmp", names) == "read <FILE>, <TMP>\n"
    assert clean("a  \nb\n\n\n", names) == "a\nb\n"
    assert clean("", names) == "\n"
