"""After the death of a rank or a truncated file nothing hangs, and the checkpoint before resumes exactly."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.test_training import assert_same
from tests.distributed.training import train

pytestmark = pytest.mark.slow


@pytest.fixture
def fresh():
    """Return a function that starts a pool for a test to break."""
    pools = []

    def start():
        pools.append(Pool(2, timeout=240, forks=True))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close(kill=True)


@pytest.mark.extended(but="save-fsdp")
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("phase", ["step", "save"])
def test_a_killed_rank_ends_the_run_and_the_last_checkpoint_resumes(fresh, pools, layout, phase, tmp_path):
    if (layout, phase) == ("ddp", "save"):
        pytest.skip("rank 0 may write everything there, and rank 1 nothing")
    pool, good, broken = fresh(), str(tmp_path / "4"), str(tmp_path / "6")
    pool.run(train, layout=layout, last=4, save=good)
    with pytest.raises(AssertionError, match="rank 1: the process died") as error:
        pool.run(train, layout=layout, first=4, last=6, load=good, save=broken, killed=phase)
    assert "rank 0: Traceback" in str(error.value)  # it has stopped waiting
    if phase == "save":
        # torch writes .metadata last, so that an incomplete checkpoint has none.
        assert not (tmp_path / "6" / ".metadata").exists()
        with pytest.raises(AssertionError, match=r"6/.metadata|metadata is None"):
            fresh().run(train, layout=layout, first=6, last=7, load=broken)
    straight = pools[2].run(train, layout=layout, last=6)[0]
    resumed = fresh().run(train, layout=layout, first=4, last=6, load=good)[0]
    assert_same(resumed, {**straight, "losses": straight["losses"][4:]})
