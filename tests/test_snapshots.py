"""The comparison with tests/golden fails where it must, and each file there is compared with something."""

from __future__ import annotations

import ast
import fnmatch
from pathlib import Path

import pytest

from tests.snapshots import FOLDER, clean, difference, write
from tests.zoo import ZOO


def names(call: ast.Call) -> str:
    """Return the name in a call of `golden`, with * for each part that is computed."""
    name = call.args[0]
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in parts)


def test_each_file_is_compared_with_something():
    calls = [
        names(node)
        for path in FOLDER.parent.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "golden"
    ]
    assert "*" not in calls, "a name begins with the folder of its tests"
    stems = {path.relative_to(FOLDER).as_posix().split(".")[0] for path in FOLDER.rglob("*.txt")}
    routes = {f"routes/{name}" for name in ZOO}
    assert {name for name in stems if name.startswith("routes/")} == routes
    assert [name for name in sorted(stems - routes) if not any(fnmatch.fnmatch(name, call) for call in calls)] == []


def test_a_difference_is_shown(tmp_path: Path):
    path = tmp_path / "folder" / "page.txt"
    assert "run make golden" in difference(path, "", older=False)
    write(path, "one\ntwo\n", older=False)
    assert difference(path, "one\ntwo\n", older=False) == ""
    shown = difference(path, "one\n2\n", older=False)
    assert "\n one\n-two\n+2\n" in shown
    assert "run make golden and look at the diff" in shown


def test_another_transformers_has_a_file_only_where_it_differs(tmp_path: Path):
    path, own = tmp_path / "page.txt", tmp_path / "page.llamafactory.txt"
    write(path, "new\n", older=False)
    write(path, "old\n", older=True)
    assert (path.read_text(), own.read_text()) == ("new\n", "old\n")
    assert difference(path, "old\n", older=False)
    assert not difference(path, "old\n", older=True)
    write(path, "new\n", older=True)
    assert not own.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("read /tmp/a/b.txt, /tmp", "read <FILE>, <TMP>\n"), ("a  \nb\n\n\n", "a\nb\n"), ("", "\n")],
)
def test_texts_are_the_same_on_each_machine(text, expected):
    assert clean(text, {"TMP": "/tmp", "FILE": "/tmp/a/b.txt"}) == expected
