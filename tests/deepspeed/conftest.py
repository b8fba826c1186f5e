"""Two ranks with DeepSpeed on the CPU, started when a test first asks for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool

collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker of pytest-xdist runs all of them, so that ranks are started once."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("deepspeed"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Two of them."""
    pool = Pool(2, timeout=240)
    yield pool
    pool.close()
