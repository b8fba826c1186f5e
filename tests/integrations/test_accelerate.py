"""`build_optimizer` and `Accelerator.prepare` in plain loops."""

from __future__ import annotations

import pytest
import torch

from hf_muon.rules.normalize import SECOND_MOMENT
from tests.e2e.layout_cases import loads_shards
from tests.integrations.accelerate_cases import loop, sharded_loop


@pytest.mark.parametrize("order", ["together", "optimizer first", "optimizer last", "model first"])
def test_ranks_of_ddp_share_the_work(pools, order):
    """Compare with one process: the same weights, and each matrix is orthogonalized by one rank."""
    expected, count, shared = loop(0, "together", ranks=1)
    assert not shared
    results = pools[2].run(loop, order=order)
    assert all(shared for _, _, shared in results)
    counts = [count for _, count, _ in results]
    assert sum(counts) == count
    assert all(0 < each < count for each in counts)
    for weights, _, _ in results:
        for a, b, c in zip(weights, expected, results[0][0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
            assert torch.equal(a, c)


def test_ranks_without_reduced_gradients_do_not_share(pools):
    """Compare each rank of a LocalSGD with a process that trains on its part alone."""
    results = pools[2].run(loop, order="together", local=True)
    for rank, (weights, count, _) in enumerate(results):
        expected, alone, _ = loop(0, "together", ranks=1, part=rank)
        assert count == alone
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@loads_shards
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
