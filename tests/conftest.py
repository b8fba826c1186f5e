"""Shared set-up of the tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import settings

from tests.distributed.pool import Pool
from tests.support.known_failures import skip_known_failures
from tests.support.temporary import use_own_folder

pytest_plugins = ["tests.support.snapshots"]
use_own_folder()
settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=400, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failure")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each case the marks by which a tier is chosen."""
    skip_known_failures(items)
    items.sort(
        key=lambda item: "e2e" not in item.nodeid
    )  # few tests, which take minutes: not at the end, on one worker
    found: dict[str, bool] = {}  # of each expression, whether it matches a case
    for item in items:
        if "pools" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
        for name, others in (("first_tier", "extended"), ("second_tier", "nightly")):
            for mark in item.iter_markers(name):
                matches = re.search(mark.args[0], case) is not None
                place = f"{item.nodeid.partition('[')[0]}: {name}({mark.args[0]!r})"
                found[place] = found.get(place, False) or matches
                if not matches:
                    item.add_marker(others)
    if items and not any("::" in arg for arg in items[0].config.args):
        assert all(found.values()), f"matches no case: {[place for place, matches in found.items() if not matches]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"with --no-skips, no test may skip: {report.longrepr}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let CI fail where more than one test was run again after a signal, which may then be of our own making."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and len(reporter.stats.get("rerun", [])) > 1:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
