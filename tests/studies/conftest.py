"""A study without interruptions, once for all tests."""

from __future__ import annotations

import pytest

from tests.studies.quick_study import run


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Return the CSV file of the small study, run without an interruption."""
    out = tmp_path_factory.mktemp("whole")
    assert run(out, 2)
    return out / "quick.csv"
