"""What other packages get wrong in versions that Muon runs with: the only tests that may be left out there.

A failure of another test with one of these versions is news. `make test-versions` runs the tests with them.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import NamedTuple

import pytest
from packaging.specifiers import SpecifierSet


class Failure(NamedTuple):
    """Something that some versions of a package cannot do, loudly: what they do wrong in silence, Muon refuses."""

    package: str
    versions: str
    what: str
    tests: str
    """Regular expression that finds the ids of the tests that need it."""


KNOWN = [
    Failure(
        "torch",
        "<2.11",
        "all-gathers have no kernel for meta tensors, with which steps of large models are counted",
        r"distributed/test_equal_calls\.py",
    ),
    Failure(
        "torch",
        "<2.12",
        "DTensor.full_tensor raises for a _StridedShard whose dims are no order of shards",
        r"strided shards|place=odd-|test_rows_and_columns_of_any_placements_are_scaled",
    ),
]


def skip_known_failures(items: list[pytest.Item], known: list[Failure] = KNOWN) -> None:
    """Mark the tests that an installed version cannot pass."""
    here = [each for each in known if _installed(each.package) in SpecifierSet(each.versions, prereleases=True)]
    for item in items:
        for each in here:
            if re.search(each.tests, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"{each.package} {each.versions}: {each.what}"))


def _installed(package: str) -> str:
    """Return a package's version, or one that no range has."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "999999"
