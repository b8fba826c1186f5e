"""Every class of transformers that cuts the result of a matrix was read; see scripts/cuts.py for what to do if not."""

from __future__ import annotations

import pytest

from hf_muon.routing.fused import RULES
from scripts.cuts import READ, cuts, sources, unread


@pytest.fixture(scope="module")
def found():
    return cuts(sources())


def test_every_class_that_cuts_a_result_was_read(found):
    assert unread(found, [*RULES, *READ]) == {}


def test_a_class_that_nobody_read_is_found(found):
    """Take each class out of the table: the cuts of nearly all are found, in the versions that have these classes."""
    ours = {source.name for source in sources()} & {own for _, names, _ in RULES for own in names.split()}
    missed = ours - {own for own, _ in unread(found, READ)}
    assert len(ours) > 150
    assert len(missed) < len(ours) / 10, sorted(missed)
