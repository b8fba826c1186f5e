"""Rounding of bf16 and fp16 weights: both neighbours with the right probabilities, the same however tensors are cut."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon.math import rounding, weight_rounding
from hf_muon.math.rounding import random_bits, round_to_half
from hf_muon.math.weight_rounding import Result, store_

HALF = (torch.bfloat16, torch.float16)


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def neighbours(values, dtype):
    """Return the values of a dtype that lie next to fp32 values, below and above, as float64."""
    nearest = values.to(dtype)
    toward = torch.where(nearest.float() > values, -math.inf, math.inf).to(dtype)
    other = torch.where(nearest.float() == values, nearest, torch.nextafter(nearest, toward))
    return torch.minimum(nearest, other).double(), torch.maximum(nearest, other).double()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 3e-7])  # fp16 is subnormal below 6.1e-5, and ends at 6e-8
def test_either_neighbour_and_the_mean_is_the_value(dtype, scale):
    values = normal(2**16, scale=scale)
    below, above = neighbours(values, dtype)
    share = torch.where(above > below, (values.double() - below) / (above - below).clamp_min(1e-300), 0.0)
    roundings_up, steps = torch.zeros_like(share), 64
    for step in range(steps):
        rounded = round_to_half(values, random_bits(values, step), dtype).double()
        assert bool(((rounded == below) | (rounded == above)).all())
        roundings_up += (rounded == above) & (above > below)
    variance = share * (1 - share)
    assert abs(float((roundings_up - steps * share).sum())) < 5 * math.sqrt(steps * float(variance.sum()))
    spread = float((roundings_up - steps * share).square().sum() / (steps * variance.sum()))
    assert spread == pytest.approx(1, abs=0.03), "one value over the steps is as random as many values in one"


@pytest.mark.parametrize("dtype", HALF)
def test_values_that_are_not_rounded(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([0.0, 1.0, -2.5, largest, -largest, 2.0**-14, 2.0**-24, math.inf, -math.inf])
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32)  # every bit of a NaN may be set
    for step in range(50):
        assert torch.equal(round_to_half(values, random_bits(values, step), dtype), values.to(dtype))
        nan = bits.view(torch.float32)
        assert bool(round_to_half(nan, random_bits(nan, step), dtype).isnan().all())


def stored(weights, exact, update, step=3):
    store_([Result(weights, exact, update)], "stochastic", step)
    return weights


@pytest.mark.parametrize("dtype", HALF)
def test_cuts_strides_and_batches_do_not_matter(dtype, monkeypatch):
    exact, update = normal(37, 24), normal(37, 24, seed=1)
    whole = stored(torch.empty(37, 24, dtype=dtype), exact, update)

    transposed = torch.empty(24, 37, dtype=dtype).mT
    assert torch.equal(stored(transposed, exact, update), whole)

    columns = torch.zeros(37, 40, dtype=dtype)
    stored(columns[:, 3:27], exact, update)
    assert torch.equal(columns[:, 3:27], whole)

    for chunk in (7, 24, 100, 10**6):
        monkeypatch.setattr(rounding, "chunk_size", lambda tensor, chunk=chunk: chunk)
        monkeypatch.setattr(
            weight_rounding, "rows_per_chunk", lambda tensor, columns, chunk=chunk: max(1, chunk // columns)
        )
        parts = torch.empty(37, 24, dtype=dtype)
        other = torch.empty(5, dtype=torch.float16 if dtype is torch.bfloat16 else torch.bfloat16)
        results = [Result(parts[i : i + 5], exact[i : i + 5], update[i : i + 5]) for i in range(0, 37, 5)]
        results.insert(3, Result(other, normal(5), normal(5)))  # ends a batch
        store_(results, "stochastic", 3)
        assert torch.equal(parts, whole)
        assert bool(((other.float() - normal(5)).abs() <= 2**-7 * normal(5).abs()).all())


def test_equal_weights_with_different_updates_are_rounded_independently():
    exact = torch.full((2**16,), 1 + 2**-9)  # a quarter of the way from 1 to the next value of bf16
    update = 1e-3 * (1 + 1e-6 * torch.arange(2**16))  # AdamW's first updates differ in their last bits
    weights = stored(torch.ones(2**16, dtype=torch.bfloat16), exact, update)
    assert float((weights > 1).double().mean()) == pytest.approx(0.25, abs=0.01)
    pairs = (weights > 1).view(-1, 2).double()
    assert float(torch.corrcoef(pairs.T)[0, 1]) == pytest.approx(0, abs=0.03)


def test_steps_are_independent():
    exact, update = torch.full((64,), 1 + 2**-9), normal(64)
    roundings = torch.stack(
        [stored(torch.empty(64, dtype=torch.bfloat16), exact, update, step=step) > 1 for step in range(4096)]
    ).double()
    assert float((roundings.mean(0) - 0.25).abs().max()) < 5 * math.sqrt(0.25 * 0.75 / 4096)
    lagged = torch.corrcoef(torch.stack([roundings[:-1].flatten(), roundings[1:].flatten()]))[0, 1]
    assert abs(float(lagged)) < 0.01


def test_nearest_is_a_cast():
    exact = normal(9, 5)
    weights = torch.empty(9, 5, dtype=torch.bfloat16)
    store_([Result(weights, exact, exact)], "nearest", 1)
    assert torch.equal(weights, exact.bfloat16())


def test_observer_sees_weights_before_and_after():
    exact, weights, observations = normal(6), torch.zeros(6, dtype=torch.bfloat16), []
    store_(
        [Result(weights, exact, exact)], "auto", 1, lambda *tensors: observations.append([t.clone() for t in tensors])
    )
    assert len(observations) == 1
    assert torch.equal(observations[0][0], torch.zeros(6, dtype=torch.bfloat16))
    assert torch.equal(observations[0][1], exact)
