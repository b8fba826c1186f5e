"""Pools of ranks, started when a test first asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker of pytest-xdist runs all of them, so that pools are started once."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Pools by number of ranks."""
    made = {size: Pool(size, forks=True) for size in (2, 3, 4)}
    yield made
    for pool in made.values():
        pool.close()
