"""Training in a layout, in this process or in a pool of ranks."""

from __future__ import annotations

import pytest


@pytest.fixture
def run(pools):
    """Return a function that trains in a layout, on ranks of a pool or in this process, and returns the results."""
    from tests.distributed.training import train

    def run(layout, ranks, **options):
        return train(0, layout, **options) if ranks == 1 else pools[ranks].run(train, layout=layout, **options)[0]

    return run
