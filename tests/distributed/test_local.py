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
        (2**20, [[0, 2, 3], [1], [4]]),
        (4 * 96, [[0, 2], [3], [1], [4]]),
        (2 * 96, [[0], [2], [3], [1], [4]]),
        (1, [[0], [2], [3], [1], [4]]),
    ],
)
def test_equal_shapes_go_together_within_the_limit(max_batch_bytes, expected):
    params = [torch.randn(shape) for shape in UPDATES]
    assert LocalExecutor(max_batch_bytes).plan(params) == expected


def test_dtypes_are_not_mixed():
    params = [torch.randn(4, 4), torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4)]
    assert LocalExecutor().plan(params) == [[0, 2], [1]]


def test_a_batch_is_one_product_and_comes_back_in_order():
    updates = [torch.randn(4, 6), torch.randn(3, 4, 6), torch.randn(4, 6)]
    batches = []
    directions = LocalExecutor().orthogonalize(updates, doubled(batches))
    assert batches == [(5, 4, 6)]
    assert all(torch.equal(d, u * 2) for d, u in zip(directions, updates, strict=True))


def test_nothing_to_do():
    assert LocalExecutor().plan([]) == []
    assert LocalExecutor().orthogonalize([], doubled([])) == []
