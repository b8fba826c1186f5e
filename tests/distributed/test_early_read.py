"""A read of the device that is asked for early: the host waits for it, and for nothing launched after it.

On a stand-in for an accelerator, see tests/stand_in.py.
"""

from __future__ import annotations

import pytest
import torch

from hf_muon.storage.early_read import EarlyRead
from tests.distributed.pool import Pool
from tests.distributed.stand_in_cases import read_early


@pytest.fixture(scope="module")
def alone():
    """Yield a pool of one process, which has the stand-in."""
    pool = Pool(1, forks=True)
    yield pool
    pool.close()


def test_a_look_waits_for_the_numbers_alone(alone):
    ((values, races, before, waited, launched),) = alone.run(read_early)
    assert values == [0, 1, 2]
    assert not races
    assert before == waited == launched - 5


def test_a_look_that_does_not_wait_is_a_race(alone):
    ((_, races, *_),) = alone.run(read_early, ordered=False)
    assert races


def test_numbers_of_the_host_are_there():
    assert EarlyRead(torch.tensor([3, 4])).tolist() == [3, 4]
    assert EarlyRead(torch.tensor(True)).tolist() is True
