"""Every error and warning has a code, and its text is in tests/golden."""

from __future__ import annotations

import re

import pytest

from scripts.messages import PAGE, ROOT, listed, messages, without_code
from tests.support.snapshots import Golden

SOURCES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "hf_muon").rglob("*.py"))]
# What stands inside of another message, which has a code.
INSIDE = (
    *("... does not end in a factor", "... has an empty alternative, which would match every parameter", "... steps"),
    "a list of one step; write its three numbers, and ns_steps: 1",
    "a parameter of shape ... is not in the model, or was not in the optimizer at the start",
    "the ranks' partitions do not hold ... whole",
    "ds_version, which every file of DeepSpeed has",
)


def test_all_texts(golden: Golden):
    golden("messages", listed(messages()))


def test_every_error_and_warning_has_a_code():
    texts = [text for source in SOURCES for text in without_code(source)]
    lacking = [text for text in texts if text not in INSIDE and "is not a view. Valid:" not in text]
    assert not lacking, "end these texts with a code in brackets, as [unknown-option], or add them to INSIDE"
    assert set(INSIDE) <= set(texts)


def test_codes_on_pages_exist():
    """Of all messages, the page has those of which it says more than they do."""
    questions = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for named in (
        re.findall(r"\*\*\[([a-z0-9-]+)\]\*\*", PAGE.read_text(encoding="utf-8")),
        re.findall(r"`\[([a-z0-9-]+)\]`", questions),
    ):
        assert named
        assert set(named) <= messages().keys()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise ValueError(f'{x} is wrong')", ["... is wrong"]),
        ("raise ValueError(f'{x} is wrong [wrong]')", []),
        ("raise ValueError(f'{x}: {complaint}')", []),
        ("raise ValueError('These are wrong:\\n  - ' + '\\n  - '.join(complaints))", []),
        ("return RuntimeError('it is wrong')", ["it is wrong"]),
        ("logger().warning('%s is lost', x)", ["%s is lost"]),
        ("raise AssertionError('a fault of our own')", []),
    ],
)
def test_texts_without_a_code_are_found(source, expected):
    assert list(without_code(source)) == expected
