"""Which tests the workers of pytest-xdist get together, and in which order.

`--dist loadgroup` of pytest-xdist 3.8 does not see the mark `xdist_group` under pytest 9.2, and no test would say so:
each worker would make again what the tests of a file share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# The tests of each of these files run in one worker: they share ranks, or runs that others are compared with.
WHOLE_FILES = (
    *("tests/chaos/", "tests/deepspeed/", "tests/distributed/"),
    "tests/cuda/test_numerics.py",
    *("tests/e2e/test_deepspeed.py", "tests/e2e/test_llamafactory.py", "tests/e2e/test_llamafactory_v1.py"),
)


def unit_of(nodeid: str) -> str:
    """Return the name of the unit of work that a test belongs to: its file, or the test alone."""
    file = nodeid.partition("::")[0]
    return file if file.startswith(WHOLE_FILES) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Return the schedule of `--dist loadgroup`: whole files first, then single tests as they were collected."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Units(config, log)


def long_files_first(items: list[pytest.Item]) -> None:
    """Move files whose tests start processes or train for long to the front, so that the workers end together."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)
