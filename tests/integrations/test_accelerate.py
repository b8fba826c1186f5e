"""`build_optimizer` and `Accelerator.prepare` in plain loops."""

from __future__ import annotations

import re

import pytest
import torch

from hf_muon.rules.normalize import SECOND_MOMENT
from tests.distributed.lacking_cases import without
from tests.e2e.layout_cases import loads_shards
from tests.integrations.accelerate_cases import loop, sharded_loop


@pytest.mark.promise("accelerate", "ray")
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


@loads_shards[0]
@loads_shards[1]
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


@pytest.mark.first_tier("1.weight momentum_buffer")
@pytest.mark.parametrize("lacks", ["1.weight momentum_buffer", "1.bias exp_avg_sq", "1.weight"])
def test_load_state_refuses_a_whole_state_that_lacks_moments(pools, lacks, tmp_path):
    """Rank 0 reads the file for all ranks, and all of them must refuse it."""
    path = str(tmp_path / "checkpoint")
    pools[2].run(sharded_loop, kind="FULL_STATE_DICT", save=path)
    file = tmp_path / "checkpoint" / "optimizer.bin"
    state = torch.load(file, weights_only=True)
    without(state, [lacks], flatten=False)
    torch.save(state, file)
    param, _, key = lacks.partition(" ")
    with pytest.raises(AssertionError) as error:
        pools[2].run(sharded_loop, kind="FULL_STATE_DICT", load=path)
    complaint = rf"moments are missing: {param} \S.* lacks \['{key or 'momentum_buffer'}'\] \[moments-missing\]\n"
    assert len(re.findall(f"ValueError: .*nothing was changed:\n  - {complaint}", str(error.value))) == 2
