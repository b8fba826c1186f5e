"""Lightning and Fabric under DDP, on stand-ins for their strategies; the examples of programs run the real ones."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.lightning_cases import loop

ORDERS = ["trainer", "module first", "optimizer first"]


def assert_equal(results, expected):
    for (weights, _, _), (others, _, _) in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize("way", ["plain", "accumulating"])
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_share_the_work_and_the_weights_are_bit_identical(pools, order, way):
    alone = pools[2].run(loop, order=order, patched=False, way=way)
    results = pools[2].run(loop, order=order, way=way)
    assert [shared for _, _, shared in alone + results] == [False, False, True, True]
    counts, whole = [count for _, count, _ in results], alone[0][1]
    assert sum(counts) == whole
    assert all(0 < count < whole for count in counts)
    assert_equal(results, alone)


@pytest.mark.parametrize(
    ("order", "way"),
    [
        ("trainer", "no_sync"),
        ("module first", "no_sync"),
        ("module first", "hook"),
        *(("module first", way) for way in ("join", "outside")),
    ],
)
def test_ranks_do_not_share_other_steps(pools, order, way):
    """Compare with the same loop without the patch; replicas whose gradients are not reduced differ."""
    alone = pools[2].run(loop, order=order, patched=False, way=way)
    results = pools[2].run(loop, order=order, way=way)
    assert not any(shared for _, _, shared in results)
    assert_equal(results, alone)
    if way in ("no_sync", "hook"):
        assert not torch.equal(results[0][0][1], results[1][0][1])
