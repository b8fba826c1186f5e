"""Whole texts, compared with the files in tests/golden: what commands print, tables and pages.

`golden("cli/plan", text)` compares with ``tests/golden/cli/plan.txt``. `make golden`, which is `pytest --golden`,
writes the files instead, and runs only the tests that use them; `git diff` then shows what a release, or a change of
the code, has changed. Where LLaMA-Factory's transformers gives another text, a file ``NAME.llamafactory.txt`` has it.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "golden"
Golden = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write tests/golden anew: look at the diff")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--golden"):
        others = [item for item in items if "golden" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def is_older() -> bool:
    """Return whether this is the transformers that LLaMA-Factory allows."""
    return importlib.metadata.version("transformers").startswith("5.5.")


def clean(text: str, replaced: dict[str, object]) -> str:
    """Return a text without what differs between machines: each value of `replaced` becomes its name, as `<NAME>`."""
    for name, value in sorted(replaced.items(), key=lambda item: -len(str(item[1]))):
        text = text.replace(str(value), f"<{name}>")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).rstrip("\n") + "\n"


def write(path: Path, text: str, *, older: bool) -> None:
    """Write a text; of the older transformers only one that differs. Run it with the newest one first."""
    if older:
        common, path = path, path.with_suffix(".llamafactory.txt")
        if common.exists() and text == common.read_text(encoding="utf-8"):
            path.unlink(missing_ok=True)
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def difference(path: Path, text: str, *, older: bool) -> str:
    """Return how a text differs from its file, or an empty string."""
    own = path.with_suffix(".llamafactory.txt")
    path = own if older and own.exists() else path
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    if text == expected and path.exists():
        return ""
    lines = difflib.unified_diff(
        expected.splitlines(), text.splitlines(), path.name, "what the test has made", lineterm=""
    )
    return "\n".join([*lines, "", "If this is meant to be so, run make golden and look at the diff."])


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return the function that compares a text with its file."""

    def compare(name: str, text: str, **replaced: object) -> None:
        path, text, older = FOLDER / f"{name}.txt", clean(text, replaced), is_older()
        if request.config.getoption("--golden"):
            write(path, text, older=older)
        elif found := difference(path, text, older=older):
            pytest.fail(found, pytrace=False)

    return compare
