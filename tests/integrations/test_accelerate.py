"""`build_optimizer` and `Accelerator.prepare` in plain loops."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.accelerate_cases import loop


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
