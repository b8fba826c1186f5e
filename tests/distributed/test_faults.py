"""A rank that dies, and files that are cut off: nothing hangs, and the checkpoint before resumes exactly."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.test_training import assert_same
from tests.distributed.training import train

pytestmark = pytest.mark.slow


@pytest.fixture
def fresh():
    """Pools that a test may break."""
    made = []

    def start():
        made.append(Pool(2, timeout=240, forks=True))
        return made[-1]

    yield start
    for pool in made:
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
    assert "rank 0: Traceback" in str(error.value)  # it has not waited in vain
    if phase == "save":
        # Written last, and so never of a checkpoint that is not whole.
        assert not (tmp_path / "6" / ".metadata").exists()
        with pytest.raises(AssertionError, match=r"6/.metadata"):
            fresh().run(train, layout=layout, first=6, last=7, load=broken)
    straight = pools[2].run(train, layout=layout, last=6)[0]
    resumed = fresh().run(train, layout=layout, first=4, last=6, load=good)[0]
    assert_same(resumed, {**straight, "losses": straight["losses"][4:]})
