"""Which keys a query sees, by how each attention of transformers passes that on."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_muon.routing.attention_logits import _Recorder
from hf_muon.rules.heads import Attention, Heads, Rows

BATCH, HEADS, LENGTH = 2, 4, 6


MODULE = torch.nn.Module()
MODULE.is_causal = True


def largest_logits(implementation, query, key, mask=None, **options):
    own = _Recorder(Attention("a", MODULE, Heads(HEADS, 2), 3, {"a.q.weight": Rows((1, 2, 3, 4))}))
    own.record(implementation, query, key, mask, {"scaling": 1.0, **options})
    return own.pop().tolist()


def allowed(implementation, mask, **options):
    """Return which keys queries see ``(B, S, T)``: of a single key that is not zero, the logit is 3, else it hides."""
    seen = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    for b, i, j in itertools.product(range(BATCH), range(LENGTH), range(LENGTH)):
        query, key = torch.full((BATCH, HEADS, LENGTH, 3), -1.0), torch.zeros(BATCH, 2, LENGTH, 3)
        query[b, :, i], key[b, :, j] = 1.0, 1.0
        (largest,) = set(largest_logits(implementation, query, key, mask, **options))
        seen[b, i, j] = largest == 3.0
    return seen


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
EVERYTHING = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
RANDOM = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
ADDED = torch.zeros(RANDOM.shape).masked_fill(~RANDOM, torch.finfo(torch.float32).min)
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
WINDOW = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < 3
DOCUMENTS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
IN_ONE = torch.stack([(d[:, None] == d) for d in (torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 0, 1, 1]))])


@pytest.mark.parametrize(
    ("implementation", "mask", "options", "expected"),
    [
        ("eager", None, {}, EVERYTHING),
        ("eager", ADDED, {}, RANDOM[:, 0]),
        ("sdpa", None, {}, CAUSAL),
        ("sdpa", None, {"is_causal": False}, EVERYTHING),
        ("sdpa", RANDOM, {}, RANDOM[:, 0]),
        ("flash_attention_2", None, {}, CAUSAL),
        ("flash_attention_2", PADDING, {}, CAUSAL & PADDING.bool()[:, None]),
        ("flash_attention_3", None, {"sliding_window": 3}, CAUSAL & WINDOW),
        ("flash_attention_2", None, {"position_ids": DOCUMENTS}, CAUSAL & IN_ONE),
        ("flash_attention_2", None, {"position_ids": torch.arange(LENGTH)[None]}, CAUSAL),
    ],
)
def test_hidden_logits_do_not_count(implementation, mask, options, expected):
    assert torch.equal(allowed(implementation, mask, **options), expected.expand(BATCH, -1, -1))


def test_ends_of_packed_documents():
    query, key = torch.ones(1, HEADS, LENGTH, 3), torch.zeros(1, 2, LENGTH, 3)
    query[:, :, 2:] = -1.0
    key[:, :, 0] = 1.0
    assert largest_logits("flash_attention_2", query, key) == [3.0] * HEADS
    query[:, :, 0] = -1.0
    ends = torch.tensor([0, 1, LENGTH])
    assert largest_logits("flash_attention_2", query, key, cu_seq_lens_q=ends) == [0.0] * HEADS
