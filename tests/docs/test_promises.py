"""Each promise of README.md, layouts and programs has an id, and tests of the first tier have a mark with that id.

An id stands in a comment behind what is promised: `<!-- shown by: ddp -->`, or several, separated by spaces.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/layouts.md", "docs/programs.md")
TABLES = {"docs/layouts.md": "| layout |", "docs/programs.md": "| program |"}


def promised(page: str) -> set[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return {word for words in re.findall(r"<!-- shown by: (.+?) -->", text) for word in words.split()}


def marks_of(node: ast.FunctionDef | ast.ClassDef) -> Iterator[tuple[str, list[str]]]:
    """Yield name and arguments of the marks of a test."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        arguments = decorator.args if isinstance(decorator, ast.Call) else []
        yield ast.unparse(called), [a.value for a in arguments if isinstance(a, ast.Constant)]


def shown() -> dict[str, list[str]]:
    """Return the tests of the first tier by the promise that they show."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            marks = list(marks_of(node))
            if ("pytest.mark.extended", []) in marks:
                continue
            for name, arguments in marks:
                for promise in arguments if name == "pytest.mark.promise" else ():
                    tests.setdefault(promise, []).append(f"{path.name}::{node.name}")
    return tests


def test_every_promise_is_shown_by_a_test_of_the_first_tier():
    assert set().union(*map(promised, PAGES)) == shown().keys()


@pytest.mark.parametrize(("page", "head"), TABLES.items())
def test_every_row_of_a_table_of_promises_has_an_id(page, head):
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = text[text.index(f"\n{head}") :].partition("\n\n")[0].strip().splitlines()[2:]
    assert rows
    assert [row for row in rows if "<!-- shown by: " not in row] == []


def test_every_command_of_the_readme_has_an_id():
    lines = re.findall(r"^hf-muon ([a-z]+)\b", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(lines) <= promised("README.md")
