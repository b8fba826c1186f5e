"""`qk_clip` on several ranks: the largest logits of all of them, and the same rows rescaled in every layout."""

from __future__ import annotations

import math

import pytest
import torch

from tests.rules.qk_clip_cases import clipped, refused, scaled
from tests.rules.settings import TOGETHER

LAYOUTS = [("ddp", 2, "llama"), ("ddp", 2, "gpt2"), ("fsdp", 2, "llama"), ("fsdp", 2, "gpt2"), ("fsdp", 2, "deepseek")]
SWAPPED = [("fsdp-swapped", 2, "llama")]
MODEL_PARALLEL = [("tp", 2, "llama"), ("fsdp-tp", 4, "llama")]


def assert_like_one_process(results, expected, rtol=1e-5):
    weights, logits = expected
    for rank_weights, rank_logits in results:
        for (largest, count), (own, own_count) in zip(logits, rank_logits, strict=True):
            assert own == pytest.approx(largest, rel=rtol)
            assert own_count == count
        for name, weight in weights.items():
            bound = rtol * float(weight.abs().max()) + 1e-9
            assert float((rank_weights[name] - weight).abs().max()) <= bound, name
        for name, weight in results[0][0].items():
            assert torch.equal(rank_weights[name], weight), f"ranks differ in {name}"


@pytest.mark.promise("qk-clip")
@pytest.mark.parametrize(("layout", "ranks", "name"), LAYOUTS + SWAPPED + MODEL_PARALLEL)
def test_every_layout_rescales_as_one_process_does(pools, layout, ranks, name):
    expected = clipped(0, "single", name)
    first = expected[1][0]
    assert first[1] >= 1
    assert max(first[0].values()) > 100
    results = pools[ranks].run(clipped, layout=layout, name=name)
    assert_like_one_process(results, expected)
    unchanged = clipped(0, "single", name, qk_clip=math.inf)[0]
    for key, weight in expected[0].items():
        same = weight == unchanged[key]
        assert torch.equal(results[0][0][key] == unchanged[key], same), "other rows than those of one process changed"


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp", 2)])
def test_training_with_accumulated_batches_goes_on_alike(pools, layout, ranks):
    expected = clipped(0, "single", lr=1e-3, steps=4)
    assert sum(count for _, count in expected[1]) > 1
    assert_like_one_process(pools[ranks].run(clipped, layout=layout, lr=1e-3, steps=4), expected, rtol=1e-3)
    together = clipped(0, "single", lr=1e-3, steps=4, **TOGETHER)
    assert_like_one_process(pools[ranks].run(clipped, layout=layout, lr=1e-3, steps=4, **TOGETHER), together, rtol=1e-3)
    accumulated = pools[ranks].run(clipped, layout=layout, lr=1e-3, steps=4, accumulate=2)
    assert_like_one_process(accumulated, expected, rtol=1e-3)


def test_a_rank_that_measures_nothing_follows_the_others(pools):
    results = pools[2].run(clipped, layout="fsdp", evaluating=(1,))
    assert results[0][1] == results[1][1]
    assert results[0][1][0][1] >= 1
    for name, weight in results[0][0].items():
        assert torch.equal(weight, results[1][0][name])


def test_steps_of_each_rank_alone_are_refused(pools):
    for text in pools[2].run(refused):
        assert "qk_clip needs the largest logits of all ranks, and this process, one of 2, steps" in text


def test_rows_and_columns_of_any_placements_are_scaled(pools):
    for results in pools[4].run(scaled, seed=3):
        for tensor, factors, dim, mine in results:
            assert torch.equal(mine, tensor * (factors.unsqueeze(1) if dim == 0 else factors))
