"""The largest logits of heads against a loop over queries and keys."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon.math import logits
from hf_muon.math.logits import largest_logits


def slow(query, key, scale, seen):
    """Return the largest logit of each head, and the mask as a function of positions."""
    batch, heads, length, _ = query.shape
    shared = heads // key.shape[1]
    largest = [-math.inf] * heads
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                for j in range(key.shape[2]):
                    if seen[b, i, j]:
                        value = float(query[b, h, i].double() @ key[b, h // shared, j].double()) * scale
                        largest[h] = max(largest[h], value)
    return torch.tensor(largest)


@pytest.mark.parametrize("block", [1, 50, 2**24])
@pytest.mark.parametrize("shared", [1, 3])
def test_it_is_that_of_a_loop(monkeypatch, block, shared):
    monkeypatch.setattr(logits, "_BLOCK", block)
    query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 6 // shared, 7, 4)
    seen = torch.rand(2, 5, 7) < 0.3
    seen[:, 2] = False

    def visible(positions):
        rows = positions.unsqueeze(-1).expand(*positions.shape, 7)
        return seen.unsqueeze(1).expand(2, 6, 5, 7).gather(2, rows)

    mine = largest_logits(query, key, 0.3, visible, None)
    torch.testing.assert_close(mine, slow(query, key, 0.3, seen), rtol=1e-5, atol=1e-6)
    some = largest_logits(query, key, 0.3, visible, 2)
    assert (some <= mine + 1e-6).all()
    torch.testing.assert_close(largest_logits(query, key, 0.3, visible, 5), mine)


def test_no_visible_key_and_no_query():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    nothing = largest_logits(query, key, 1.0, lambda positions: torch.zeros(1, 1, 1, 3, dtype=torch.bool), None)
    assert nothing.tolist() == [-math.inf] * 2
    assert largest_logits(query[:, :, :0], key, 1.0, lambda positions: None, None).tolist() == [-math.inf] * 2
