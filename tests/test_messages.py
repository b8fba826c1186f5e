"""Every error and warning has a code, and its text is in tests/golden and on the page of troubleshooting."""

from __future__ import annotations

import pytest

from tests.messages import PAGE, ROOT, bold_texts, listed, messages, problems, texts_of, with_texts, without_code
from tests.snapshots import Golden

SOURCES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "hf_muon").rglob("*.py"))]
# What stands inside of another message, which has a code.
INSIDE = (
    *("... does not end in a factor", "... has an empty alternative, which would match every parameter", "... steps"),
    "a list of one step; write its three numbers, and ns_steps: 1",
    *("not ... numbers", "no object", "neither the path of a JSON file nor a mapping"),
    "a parameter of shape ... is not in the model, or was not in the optimizer at the start",
    "the ranks' partitions do not hold ... whole",
)
# Of other packages, on the page for people who search for them.
OF_OTHERS = ("... is not a valid OptimizerNames", "Missing key in checkpoint state_dict: ...")


def test_all_texts(golden: Golden):
    golden("messages", listed(messages()))


def test_every_error_and_warning_has_a_code():
    texts = [text for source in SOURCES for text in without_code(source)]
    lacking = [text for text in texts if text not in INSIDE and "is not a view. Valid:" not in text]
    assert not lacking, "end these texts with a code in brackets, as [unknown-option], or add them to INSIDE"
    assert set(INSIDE) <= set(texts)


def test_the_page_has_an_entry_for_every_code():
    page, found = PAGE.read_text(encoding="utf-8"), messages()
    assert problems(page, found) == []
    assert page == with_texts(page, found), "docs/troubleshooting.md is outdated: run `python -m tests.messages`"


def test_texts_without_a_code_on_the_page_are_in_the_source():
    """Look for the longest fixed part of each: headlines, reasons, and states that `hf-muon doctor` lists."""
    known = " ".join(" ".join(" ".join(texts_of(source)).split()) for source in SOURCES)
    for text in bold_texts(PAGE.read_text(encoding="utf-8"))[""]:
        longest = max(text.split("..."), key=len).strip(" .,:;()")
        assert text in OF_OTHERS or longest in known, f"{text}: remove it from docs/troubleshooting.md"


PAGE_OF_TWO = r"""
**`... is wrong [wrong]`** \
**`... is lost [lost]`**

Find it.
"""
FOLLOWED = r"""
**`... is wrong [wrong]`** \
**`... is lost here [lost]`** \
**``both `a` and `b` are lost [lost]``**

Find it.
"""


def test_texts_on_the_page_follow_the_source():
    found = {"lost": ["... is lost"], "wrong": ["... is wrong"]}
    assert with_texts(PAGE_OF_TWO, found) == PAGE_OF_TWO
    assert problems(PAGE_OF_TWO, found) == []
    found = {"lost": ["... is lost here", "both `a` and `b` are lost"], "new": ["new"]}
    assert with_texts(PAGE_OF_TWO, found) == FOLLOWED
    assert with_texts(FOLLOWED, {**found, "lost": ["... is lost"], "wrong": ["... is wrong"]}) == PAGE_OF_TWO
    assert [line.partition("]")[0] for line in problems(FOLLOWED, found)] == ["[new", "[wrong"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise ValueError(f'{x} is wrong: {y:.3g} [wrong]')", ["... is wrong: ... [wrong]"]),
        ("LATE = '{name} is late [late]'", ["... is late [late]"]),
        (
            "_USE = 'Use it'\nraise ValueError(f'{x} is wrong. {_USE} [wrong]')",
            ["Use it", "... is wrong. Use it [wrong]"],
        ),
        ("logger().warning('%s is lost at %.0f%% [lost]', x)", ["... is lost at ...% [lost]"]),
        ("yield 'the command has no {file} [lost]'", ["the command has no {file} [lost]"]),
    ],
)
def test_texts_are_read_from_the_source(source, expected):
    assert list(texts_of(source)) == expected


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
