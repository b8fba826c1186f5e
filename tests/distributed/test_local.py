from __future__ import annotations

import pytest
import torch

from hf_muon.distributed import LocalExecutor


def doubled(batches):
    def orthogonalize(matrices):
        batches.append(tuple(matrices.shape))
        return matrices * 2

    return orthogonalize


UPDATES = [(4, 6), (6, 4), (3, 4, 6), (4, 6), (2, 2)]


@pytest.mark.parametrize(
    ("max_batch_bytes", "expected"),
    [
        (2**20, [(5, 4, 6), (1, 6, 4), (1, 2, 2)]),
        (2 * 96, [(1, 4, 6), (3, 4, 6), (1, 4, 6), (1, 6, 4), (1, 2, 2)]),
        (1, [(1, 4, 6), (3, 4, 6), (1, 4, 6), (1, 6, 4), (1, 2, 2)]),
    ],
)
def test_equal_shapes_are_stacked_within_the_limit(max_batch_bytes, expected):
    updates = [torch.randn(shape) for shape in UPDATES]
    batches = []
    directions = LocalExecutor(max_batch_bytes).orthogonalize(updates, doubled(batches))
    assert batches == expected
    assert all(torch.equal(d, u * 2) for d, u in zip(directions, updates, strict=True))


def test_dtypes_are_not_mixed():
    updates = [torch.randn(4, 4), torch.randn(4, 4, dtype=torch.float64)]
    batches = []
    directions = LocalExecutor().orthogonalize(updates, doubled(batches))
    assert len(batches) == 2
    assert [d.dtype for d in directions] == [torch.float32, torch.float64]


def test_nothing_to_do():
    assert LocalExecutor().orthogonalize([], doubled([])) == []
