"""Pools of ranks: how their processes end."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.pool import Crash, Pool

pytestmark = pytest.mark.slow


def at_the_end(rank, victim=None, how=0):
    """Have a rank end by a signal or an exit code, after everything that was asked of it."""
    if rank == victim:
        dist.destroy_process_group = lambda: os.kill(os.getpid(), how) if how > 3 else os._exit(how)


@pytest.mark.first_tier("SIGABRT")
@pytest.mark.parametrize(
    ("how", "ending"),
    [(signal.SIGABRT, "ended with SIGABRT"), (signal.SIGSEGV, "ended with SIGSEGV"), (3, "ended with exit code 3")],
)
def test_a_rank_that_dies_at_its_end_is_an_error(how, ending):
    pool = Pool(2, timeout=60, forks=True)
    pool.run(at_the_end, victim=1, how=how)
    with pytest.raises(AssertionError, match=rf"^rank 1 {ending}\. .* tests.distributed.test_pool.at_the_end$"):
        pool.close()
    pool.close()


def in_between(rank):
    """Have a rank end as in a crash inside torch, while the other waits for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_crash_is_seen_through_hypothesis():
    """Expect the text for which the Makefile has pytest try a test again; hypothesis would call it flaky."""
    pool, tries = Pool(2, timeout=60, forks=True), []

    @settings(database=None)
    @given(st.integers())
    def drawn(number):
        tries.append(number)
        pool.run(in_between)

    with pytest.raises(Crash, match="rank 1: the process died: ended with SIGSEGV"):
        drawn()
    assert len(tries) == 1
    pool.close()
