"""Every error and warning has a code, and its text is in tests/golden and on the page of troubleshooting."""

from __future__ import annotations

import pytest

from tests.messages import listed, messages, texts_of
from tests.snapshots import Golden


def test_all_texts(golden: Golden):
    golden("messages", listed(messages()))


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
