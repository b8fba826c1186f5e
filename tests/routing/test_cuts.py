"""Text models and vision towers of transformers that cut the result of a matrix were read; see scripts/cuts.py."""

from __future__ import annotations

import pytest

from hf_muon.routing.fused import CUTS
from scripts.cuts import classes, cuts, unread

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def found():
    return cuts()


def test_every_class_that_cuts_a_result_was_read(found):
    assert unread(found) == {}


def test_a_class_that_nobody_read_is_found(found):
    """Expect nearly all rows of the table among the cuts, of the classes that the installed version has."""
    theirs = {own.name for own, _ in classes()}
    ours = {(name, own) for name, owners, _ in CUTS for own in owners if own in theirs}
    assert len(ours) > 100
    assert len(ours - set(found)) < len(ours) / 10, sorted(ours - set(found))
