"""Pools of ranks: how their processes end."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow


def at_the_end(rank, victim, how):
    """Have a rank end in another way than by itself, after everything that was asked of it."""

    def end():
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))

    if rank == victim:
        dist.destroy_process_group = end


@pytest.mark.first_tier("SIGABRT")
@pytest.mark.parametrize(
    ("how", "ending"), [("SIGABRT", "ended with SIGABRT"), ("SIGSEGV", "ended with SIGSEGV"), ("exit", "exit code 3")]
)
def test_a_rank_that_dies_at_its_end_is_an_error(how, ending):
    pool = Pool(2, timeout=60, forks=True)
    pool.run(at_the_end, victim=1, how=how)
    with pytest.raises(AssertionError, match=rf"^rank 1 .*{ending}\. .* tests.distributed.test_pool.at_the_end$"):
        pool.close()
    pool.close()


def test_a_rank_that_dies_in_between_is_an_error():
    pool = Pool(2, timeout=60, forks=True)
    pool.run(at_the_end, victim=2, how="")
    pool._workers[0][0].kill()
    pool._workers[0][0].join()
    with pytest.raises(AssertionError, match="rank 0 ended with SIGKILL"):
        pool.close()


@pytest.mark.first_tier("True")
@pytest.mark.parametrize("forks", [True, False])
def test_ranks_end_by_themselves(forks):
    pool = Pool(2, timeout=60, forks=forks)
    pool.run(at_the_end, victim=2, how="")
    pool.close()
