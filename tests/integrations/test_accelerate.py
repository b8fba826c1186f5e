"""`build_optimizer` and `Accelerator.prepare` in plain loops; equality of all layouts is in `tests/equality`."""

from __future__ import annotations

import re

import pytest
import torch

from hf_muon.rules.normalize import SECOND_MOMENT
from tests.distributed.lacking_cases import without
from tests.e2e.layout_cases import loads_shards
from tests.integrations.accelerate_cases import loop, sharded_loop


@pytest.mark.every_stack
@pytest.mark.promise("accelerate", "ray")
def test_ranks_of_ddp_share_the_work_in_each_order_of_preparing(pools):
    """Compare with one process: the same weights, and each matrix is orthogonalized by one rank."""
    expected, count, shared = loop(0, "together", ranks=1)
    assert not shared
    for order in ("together", "optimizer first", "optimizer last", "model first"):
        results = pools[2].run(loop, order=order)
        counts = [own for _, own, _ in results]
        assert all(shared for _, _, shared in results), order
        assert sum(counts) == count
        assert all(0 < each < count for each in counts)
        for a, b, other in zip(results[0][0], results[1][0], expected, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, other, rtol=0, atol=1e-6)


@loads_shards
@pytest.mark.extended
@pytest.mark.second_tier("none-rows")
@pytest.mark.parametrize(("before", "after"), [("none", "rows"), ("rows", "none")])
def test_load_state_switches_a_rule_with_shards_as_with_a_whole_state(pools, before, after, tmp_path):
    results = []
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        path = str(tmp_path / kind)
        pools[2].run(sharded_loop, kind=kind, save=path, normalize=before)
        results.append(pools[2].run(sharded_loop, kind=kind, load=path, normalize=after)[0])
    sharded, full = results
    assert any(name.endswith(SECOND_MOMENT) for name in sharded) is (after == "rows")
    assert sharded.keys() == full.keys()
    assert all(torch.equal(sharded[name], value) for name, value in full.items())


@pytest.mark.extended
@pytest.mark.every_stack
def test_load_state_refuses_a_whole_state_that_lacks_moments(pools, tmp_path):
    """Rank 0 reads the file for all ranks, and all of them must refuse it."""
    path = str(tmp_path / "checkpoint")
    pools[2].run(sharded_loop, kind="FULL_STATE_DICT", save=path)
    file = tmp_path / "checkpoint" / "optimizer.bin"
    state = torch.load(file, weights_only=True)
    without(state, ["1.weight momentum_buffer"], flatten=False)
    torch.save(state, file)
    with pytest.raises(AssertionError) as error:
        pools[2].run(sharded_loop, kind="FULL_STATE_DICT", load=path)
    complaint = r"moments are missing: 1.weight \S.* lacks \['momentum_buffer'\] \[moments-missing\]\n"
    assert len(re.findall(f"ValueError: .*nothing was changed:\n  - {complaint}", str(error.value))) == 2
