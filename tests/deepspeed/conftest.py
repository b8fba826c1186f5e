"""Two ranks with DeepSpeed on the CPU, which the first test that needs them starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.deepspeed.pools import pool_of
from tests.distributed.pool import Pool

collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Yield a pool of two ranks."""
    pool = pool_of(2)
    yield pool
    pool.close()


@pytest.fixture
def quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Record warnings: DeepSpeed uses what torch has deprecated."""
