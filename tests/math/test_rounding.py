from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_muon.math.rounding import round_to_bf16


def rounded(values, step):
    """Round as `round_to_bf16` does, with numpy's unsigned integers."""
    bits = values.numpy().view(np.uint32)
    with np.errstate(over="ignore"):

        def mixed(x):
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
            return x ^ (x >> np.uint32(16))

        noise = mixed(bits ^ mixed(np.array([step], dtype=np.uint32) * np.uint32(0x9E3779B9)))
    return torch.from_numpy(((bits + (noise & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)).view(np.float32))


class TestStochasticRounding:
    def test_rule(self):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        for step in (1, 2, 77777):
            assert torch.equal(round_to_bf16(values, step), rounded(values, step))

    def test_either_neighbour_and_the_mean_is_the_value(self):
        values = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
        below = (values.view(torch.int32) & -0x10000).view(torch.float32)
        above = ((below.view(torch.int32)) + 0x10000).view(torch.float32)
        away = ((values - below) / (above - below)).double()  # from zero, in units in the last place
        roundings_up = torch.zeros_like(away)
        steps = 32
        for step in range(steps):
            result = round_to_bf16(values, step)
            assert bool(((result == below) | (result == above)).all())
            roundings_up += result == above
        sigma = math.sqrt(float((away * (1 - away)).sum()) * steps)
        assert abs(float((roundings_up - steps * away).sum())) < 5 * sigma
        # The choice depends neither on the value's last bits nor on its sign or size.
        for part in (away < 0.1, away > 0.9, values < 0, values.view(torch.int32) & 1 == 1):
            some = away[part]
            sigma = math.sqrt(float((some * (1 - some)).sum()) * steps)
            assert abs(float((roundings_up - steps * away)[part].sum())) < 5 * sigma
        # The choices for one value over the steps are as random as those for many values in one step.
        spread = ((roundings_up - steps * away).square().sum() / (steps * (away * (1 - away)).sum())).item()
        assert spread == pytest.approx(1, abs=0.02)

    def test_bf16_values_stay_and_nothing_becomes_infinite(self):
        values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.finfo(torch.bfloat16).max, 1e-40])
        values = values.bfloat16().float()
        for step in range(50):
            assert torch.equal(round_to_bf16(values, step), values)
        largest = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
        assert all(bool(round_to_bf16(largest, step).isfinite().all()) for step in range(50))
