"""Pools of ranks, started when a test first asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Pools by number of ranks."""
    made = {size: Pool(size) for size in (2, 3, 4)}
    yield made
    for pool in made.values():
        pool.close()
