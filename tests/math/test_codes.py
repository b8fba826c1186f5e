"""8-bit codes: the nearest level, unbiased rounding, and what has to stay exact."""

from __future__ import annotations

import math

import pytest
import torch

from hf_muon.math.codes import BLOCK, FOURTH_POWERS, SQUARES, Quantized, salted_codes, scale_shape
from hf_muon.math.rounding import salt


def blocks_of(shape, code):
    return Quantized(torch.zeros(shape, dtype=code.dtype), torch.zeros(scale_shape(shape)), code)


def spread(*shape, seed=0):
    """Return numbers over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))


def levels(values, code):
    """Return the levels next to values, below and above, and the codes of those below, in float64."""
    blocks = blocks_of(values.shape, code)
    blocks.store_(values)
    scales = blocks.scales.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]].double()
    fractions = values.abs().double() / scales.clamp_min(1e-300)
    below = (fractions ** (1 / code.power) * code.largest + 1e-9).floor().clamp(max=code.largest - 1)
    return (below / code.largest) ** code.power * scales, ((below + 1) / code.largest) ** code.power * scales, below


@pytest.mark.parametrize("code", [SQUARES, FOURTH_POWERS], ids=["squares", "fourth powers"])
def test_codes_stand_for_powers_and_the_largest_for_the_scale(code):
    codes = torch.arange(-code.largest if code.dtype.is_signed else 0, code.largest + 1).to(code.dtype)
    fractions = code.fractions(codes)
    exact = codes.double().sign() * (codes.double().abs() / code.largest) ** code.power
    assert ((fractions - exact).abs() <= 2**-22 * exact.abs()).all()
    assert (fractions.diff() > 0).all()
    assert fractions[-1] == 1


def test_second_moments_get_the_nearest_code():
    values = spread(40, 150).square()
    blocks = blocks_of(values.shape, FOURTH_POWERS)
    blocks.store_(values)
    scales = blocks.scales.repeat_interleave(BLOCK, -1)[..., :150]
    off = (blocks.values() / scales) ** 0.25 - (values / scales) ** 0.25
    positive = blocks.codes > 1
    assert float(off[positive].abs().max()) * 255 < 0.5 + 1e-3
    again = blocks_of(values.shape, FOURTH_POWERS)
    again.store_(blocks.values())
    assert torch.equal(again.codes, blocks.codes)


@pytest.mark.parametrize("code", [SQUARES, FOURTH_POWERS], ids=["squares", "fourth powers"])
def test_rounding_at_random_has_the_value_as_its_mean(code):
    values = spread(24, 200) if code is SQUARES else spread(24, 200).square()
    low, high, below = levels(values, code)
    share = ((values.abs().double() - low) / (high - low)).clamp(0, 1)
    ups, steps = torch.zeros_like(share), 200
    for step in range(steps):
        blocks = blocks_of(values.shape, code)
        blocks.store_rounded_(values, step)
        codes = blocks.codes.double().abs()
        assert bool(((codes == below) | (codes == below + 1)).logical_or(codes == 1).all())
        assert bool((blocks.values() * values >= 0).all())
        ups += codes > below
    free = (share > 1e-6) & (share < 1 - 1e-6) & ((below > 0) | (code is SQUARES))
    variance = share * (1 - share) * free
    assert abs(float(((ups - steps * share) * free).sum())) < 5 * math.sqrt(steps * float(variance.sum()))


def test_a_second_moment_is_zero_only_where_it_is():
    values = torch.full((2, 64), 1e-30)
    values[:, 0], values[1, 5] = 1.0, 0.0
    for step in range(20):
        blocks = blocks_of(values.shape, FOURTH_POWERS)
        blocks.store_rounded_(values, step)
        assert torch.equal(blocks.values() == 0, values == 0)


@pytest.mark.parametrize("code", [SQUARES, FOURTH_POWERS], ids=["squares", "fourth powers"])
def test_a_row_that_only_decays_keeps_its_codes(code):
    """Decay, as rows of rare tokens do between their gradients: no noise is added."""
    values = spread(8, 192) if code is SQUARES else spread(8, 192).square()
    blocks = blocks_of(values.shape, code)
    blocks.store_(values)
    codes, scales = blocks.codes.clone(), blocks.scales.clone()
    differing = 0
    for step in range(300):
        blocks.store_rounded_(blocks.values() * 0.999, step)
        differing = int((blocks.codes != codes).sum())
    assert differing <= 8 * 192 * 300 * 2**-18, "but for the last bit of a quotient"
    assert torch.allclose(blocks.scales, scales * 0.999**300, rtol=1e-4)


def test_rows_and_chunks_of_rows_are_rounded_alike():
    values = spread(12, 130).square()
    whole = blocks_of(values.shape, FOURTH_POWERS)
    whole.store_rounded_(values, 7)
    for rows in (1, 5):
        parts = [blocks_of(part.shape, FOURTH_POWERS) for part in torch.split(values, rows)]
        for part, own in zip(parts, torch.split(values, rows), strict=True):
            part.store_rounded_(own, 7)
        assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)


@pytest.mark.parametrize("code", [SQUARES, FOURTH_POWERS], ids=["squares", "fourth powers"])
def test_codes_of_a_function_are_those_that_are_stored(code):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, BLOCK, generator=generator) * torch.logspace(-9, 3, 40)[:, None]
    values[0] = values[1, ::2] = 0
    values = values if code.dtype.is_signed else values.square()
    stored = Quantized(torch.zeros(40, BLOCK, dtype=code.dtype), torch.zeros(40, 1), code)
    for step in (1, 7):
        stored.store_rounded_(values.clone(), step)
        codes, scales = salted_codes(values, torch.tensor(salt(step), dtype=torch.int32), code)
        assert torch.equal(codes.to(code.dtype), stored.codes)
        assert torch.equal(scales, stored.scales)
