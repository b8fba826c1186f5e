"""Copies of each rank's data reach all ranks, whether ranks have about equally much or not."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_muon.distributed import transfers
from hf_muon.distributed.transfers import Copied


def copied(rank, sizes):
    """Return what arrives, which collectives took it, and the elements that this rank allocated to send."""
    own = torch.arange(sizes[rank], dtype=torch.float32) + 100 * rank
    calls = []

    def noting(original, name):
        def noted(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        return noted

    with (
        mock.patch.object(transfers, "all_gather", noting(transfers.all_gather, "all-gather")),
        mock.patch.object(dist, "broadcast", noting(dist.broadcast, "broadcast")),
    ):
        transfer = Copied(own, sizes, dist.group.WORLD)
        return [part.tolist() for part in transfer.wait()], calls, len(transfer._own)


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        ([5, 5, 5, 5], ["all-gather"]),
        ([5, 4, 5, 4], ["all-gather"]),
        ([5, 0, 0, 3], ["broadcast"] * 2),
        ([0, 7, 0, 0], ["broadcast"]),
    ],
)
def test_every_rank_has_the_data_of_all(pools, sizes, calls):
    expected = [[100.0 * r + i for i in range(size)] for r, size in enumerate(sizes)]
    for rank, (parts, names, sends) in enumerate(pools[4].run(copied, sizes=sizes)):
        assert parts == expected
        assert names == calls
        assert sends == (max(sizes) if calls == ["all-gather"] else sizes[rank])
