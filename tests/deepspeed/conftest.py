"""Two ranks with DeepSpeed on the CPU, which the first test that needs them starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool

collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests in one worker of pytest-xdist, which starts the ranks once."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("deepspeed"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Yield a pool of two ranks."""
    pool = Pool(2, timeout=240)
    yield pool
    pool.close()


@pytest.fixture
def quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Record warnings: DeepSpeed uses what torch has deprecated."""
