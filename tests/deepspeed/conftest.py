"""Pools of ranks with DeepSpeed on the CPU, forked from a process that has imported it; each starts when it is used."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool

collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["*.py"]
PRELOADED = tuple(f"tests.deepspeed.{name}" for name in ("runs", "test_trainer"))


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Yield pools by number of ranks."""
    by_size = {size: Pool(size, timeout=240, forks=True, modules=PRELOADED) for size in (1, 2, 4)}
    with contextlib.ExitStack() as stack:
        for pool in by_size.values():
            stack.callback(pool.close)
        yield by_size


@pytest.fixture(scope="session")
def ranks(pools: dict[int, Pool]) -> Pool:
    """Return a pool of two ranks."""
    return pools[2]


@pytest.fixture
def quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Record warnings: DeepSpeed uses what torch has deprecated."""
