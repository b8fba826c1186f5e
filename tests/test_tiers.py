"""The two tiers: every promise of the README is in the first, and the two together are everything."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import readme
from tests.tiers import belongs, lost, select, shows_older_versions

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAYOUTS = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
STACKS = ("newest", "deepspeed", "llamafactory")


def functions(path):
    """Return for each node id of a file whether a mark leaves all of its cases out of the first tier."""
    extended_by_test = {}

    def visit(body, prefix, extended):
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                marks = [ast.unparse(decorator) for decorator in node.decorator_list]
                left_out = extended or "pytest.mark.extended" in marks
                extended_by_test[f"{prefix}::{node.name}"] = left_out
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}::{node.name}", left_out)

    visit(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, path, False)
    return extended_by_test


@pytest.mark.parametrize("test", sorted(readme.TESTS))
def test_each_promise_has_a_test_in_the_first_tier(test):
    extended_by_test = functions(test.partition("::")[0])
    assert test in extended_by_test, "this test does not exist; see tests/readme.py"
    assert not extended_by_test[test], "this test is extended; see tests/readme.py"
    stacks = [name for name in STACKS if belongs(test, name)]
    assert any(name != "llamafactory" or shows_older_versions(test) for name in stacks)


def test_every_layout_of_the_documentation_is_named():
    table = LAYOUTS[LAYOUTS.index("\n| layout |") :].partition("\n\n")[0].strip().splitlines()
    rows = [line.split("|")[1] for line in table[2:]]
    assert len(rows) >= 10
    assert [row for row in rows if not any(word.lower() in row.lower() for word in readme.LAYOUTS)] == []


def test_every_command_of_the_readme_is_named():
    assert set(re.findall(r"\bhf-muon ([a-z]+)\b", README)) == readme.COMMANDS.keys()


class Item(SimpleNamespace):
    """A stand-in for pytest.Item, with the attributes that tiers read."""

    def get_closest_marker(self, name):
        return name in self.marks

    def iter_markers(self, name):
        return [pytest.mark.extended.mark] if name in self.marks else []


ITEMS = [
    Item(nodeid="tests/math/test_gram.py::test_a", marks=[], fixturenames=[]),
    Item(nodeid="tests/math/test_gram.py::test_b", marks=["extended"], fixturenames=[]),
    Item(nodeid="tests/distributed/test_layouts.py::test_c", marks=[], fixturenames=["pools"]),
    Item(nodeid="tests/integrations/test_transformers.py::test_d", marks=["slow"], fixturenames=[]),
    Item(nodeid="tests/cli/test_app.py::test_e", marks=[], fixturenames=[]),
    Item(nodeid="tests/deepspeed/test_training.py::test_f", marks=[], fixturenames=["ranks"]),
    Item(nodeid="tests/e2e/test_deepspeed.py::test_g", marks=["slow", "extended"], fixturenames=[]),
    Item(nodeid="tests/e2e/test_llamafactory.py::test_h", marks=["slow"], fixturenames=[]),
    Item(nodeid="tests/cuda/test_kernels.py::test_of_no_stack", marks=[], fixturenames=[]),
    Item(nodeid="tests/deepspeed/test_gradients.py::test_x[2-cpu-4]", marks=[], fixturenames=["ranks"]),
]


@pytest.mark.parametrize(
    ("stack", "quick", "first", "rest"),
    [
        ("newest", "ae", "acde", "b"),
        ("deepspeed", "", "fx", "g"),
        ("llamafactory", "", "dhx", "eg"),
    ],
)
def test_tiers_of_each_stack(stack, quick, first, rest):
    def letters(tier):
        return "".join(item.nodeid.partition("::test_")[2][0] for item in select(ITEMS, tier, stack))

    if stack == "newest":
        assert letters("quick") == quick
    assert letters("first") == first
    assert letters("rest") == rest
    assert sorted(letters("all")) == sorted(first + rest)


def test_a_promise_that_the_first_tier_has_lost():
    promise = "tests/e2e/test_llamafactory.py::test_two_processes_agree_with_one"
    collected = [Item(nodeid=f"{promise}[a]", marks=[], fixturenames=[])]
    assert promise not in lost(collected, collected, "llamafactory")
    assert promise not in lost(collected, [], "newest")
    assert promise in lost(collected, [], "llamafactory")
