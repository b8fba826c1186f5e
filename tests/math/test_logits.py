"""The largest logits of heads beside the whole matrix of logits."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon.math import logits
from hf_muon.math.logits import largest_logits


@pytest.mark.parametrize("block", [1, 50, 2**24])
@pytest.mark.parametrize("shared", [1, 3])
def test_it_is_the_largest_that_is_seen(monkeypatch, block, shared):
    monkeypatch.setattr(logits, "_BLOCK", block)
    query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 6 // shared, 7, 4)
    seen = torch.rand(2, 5, 7) < 0.3
    seen[:, 2] = False
    products = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.repeat_interleave(shared, 1).double())
    expected = (0.3 * products).masked_fill(~seen.unsqueeze(1), -math.inf).amax((0, 2, 3)).float()

    def visible(positions):
        rows = positions.unsqueeze(-1).expand(*positions.shape, 7)
        return seen.unsqueeze(1).expand(2, 6, 5, 7).gather(2, rows)

    for count in (None, 5):
        largest = largest_logits(query, key, 0.3, visible, count)
        torch.testing.assert_close(largest, expected, rtol=1e-5, atol=1e-6)
    assert (largest_logits(query, key, 0.3, visible, 2) <= expected + 1e-6).all()


def test_no_visible_key_and_no_query():
    query, hidden = torch.randn(1, 2, 3, 4), torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    for rows, visible in ((3, lambda positions: hidden), (0, lambda positions: None)):
        assert largest_logits(query[:, :, :rows], query, 1.0, visible, None).tolist() == [-math.inf] * 2
