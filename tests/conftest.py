"""Shared set-up of the tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.distributed.pool import Pool
from tests.known_failures import skip_known_failures
from tests.promises import pytest_configure, pytest_runtest_makereport  # noqa: F401  hooks
from tests.temporary import use_own_folder
from tests.tiers import keep_tier, pytest_addoption  # noqa: F401  hook
from tests.workers import long_files_first, pytest_xdist_make_scheduler  # noqa: F401  hook

pytest_plugins = ["tests.snapshots"]
use_own_folder()
settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)
STARTUP = str(Path(__file__).parent / "startup")
if STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # workers of pytest-xdist have it already
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _log_reaches_caplog() -> None:
    """Let `caplog` see the package's log lines, also after a test or a module of cases that has changed the logger."""
    logger = logging.getLogger("hf_muon")
    logger.propagate = True
    logger.setLevel(logging.INFO)


@pytest.fixture(autouse=True)
def _skip_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_tier(config, items)
    long_files_first(items)
    skip_known_failures(items)


def pytest_collection_finish() -> None:
    """Let the collections of each Trainer and of DeepSpeed leave out what was imported: they would take 0.3 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Yield pools by number of ranks; each starts when a test first runs something on it."""
    by_size = {size: Pool(size, forks=True) for size in (2, 3, 4)}
    with contextlib.ExitStack() as stack:
        for pool in by_size.values():
            stack.callback(pool.close)
        yield by_size
