"""Rounding to bf16 and 8-bit codes: at random both neighbours with the right probabilities, or to the nearest.

However tensors are cut, stored and batched, an element is rounded alike.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_muon.math.moments import BLOCK, MOMENTS, SCALES, decoded, encode_, scale_shape
from hf_muon.math.rounding import round_to_bf16, salt, salted_bf16, salted_bits
from hf_muon.math.update import apply_directions_
from tests.optimizer.cases import normal

SQUARES, FOURTH_POWERS = MOMENTS["exp_avg"], MOMENTS["exp_avg_sq"]
CODES = pytest.mark.parametrize("code", [SQUARES, FOURTH_POWERS], ids=["squares", "fourth powers"])


def spread(*shape, code=SQUARES):
    """Return numbers over many orders of magnitude, for fourth powers none below zero."""
    values = normal(*shape) * torch.exp(2 * normal(*shape, seed=1))
    return values if code is SQUARES else values.square()


class Stored:
    """A moment of zeros in 8 bits, as the state of a parameter holds it."""

    def __init__(self, shape, code):
        self.code, self.codes, self.scales = code, torch.zeros(shape, dtype=code.dtype), torch.zeros(scale_shape(shape))
        self._state = {SCALES[code.scale]: self.codes, code.scale: self.scales}

    def values(self):
        return decoded(self._state, SCALES[self.code.scale])

    def store_(self, values):
        encode_(self._state, SCALES[self.code.scale], values)


def scales_of(blocks):
    return blocks.scales.repeat_interleave(BLOCK, -1)[..., : blocks.codes.shape[-1]]


def of_weights(values, step):
    return round_to_bf16(values, salted_bits(values, salt(step)))


def of_moments(values, step):
    return salted_bf16(values, salt(step))


def store_rounded_(blocks, values, step):
    """Store values as AdamW's step does."""
    for k, (part, codes) in enumerate(zip(values.split(BLOCK, -1), blocks.codes.split(BLOCK, -1), strict=True)):
        own, scales = blocks.code.codes_of(part, salt(step))
        codes.copy_(own)
        blocks.scales[..., k] = scales.squeeze(-1)


def rounded(values, step):
    """Round as `of_moments` does, with numpy's unsigned integers."""
    bits = values.numpy().view(np.uint32)
    with np.errstate(over="ignore"):

        def mixed(x):
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
            return x ^ (x >> np.uint32(16))

        noise = mixed(bits ^ mixed(np.array([step], dtype=np.uint32) * np.uint32(0x9E3779B9)))
    return torch.from_numpy(((bits + (noise & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)).view(np.float32))


def test_bf16_is_rounded_by_this_rule():
    for step in (1, 2, 77777):
        assert torch.equal(of_moments(normal(1000), step), rounded(normal(1000), step))


def of_bf16(function, scale=1.0):
    """Return values, both neighbours of each, the share of roundings up, and what rounds them in a step."""
    values = normal(2**16, scale=scale)
    nearest = values.bfloat16()
    toward = torch.where(nearest.float() > values, -math.inf, math.inf).bfloat16()
    other = torch.where(nearest.float() == values, nearest, torch.nextafter(nearest, toward))
    below, above = torch.minimum(nearest, other).double(), torch.maximum(nearest, other).double()
    share = torch.where(above > below, (values.double() - below) / (above - below).clamp_min(1e-300), 0.0)
    return values, below, above, share, lambda step: function(values, step).double()


def of_codes(code):
    values = spread(24, 700, code=code)
    blocks = Stored(values.shape, code)
    blocks.store_(values)
    scales = scales_of(blocks).double()
    fractions = values.abs().double() / scales
    below = (fractions ** (1 / code.power) * code.largest + 1e-9).floor().clamp(max=code.largest - 1)
    low, high = ((level / code.largest) ** code.power * scales for level in (below, below + 1))
    share = ((values.abs().double() - low) / (high - low)).clamp(0, 1)
    share[(share < 1e-6) | (share > 1 - 1e-6)] = 0  # a level, but for rounding
    if code is FOURTH_POWERS:
        share[below == 0] = 1  # only zero becomes zero

    def store(step):
        store_rounded_(blocks, values, step)
        assert bool((blocks.values() * values >= 0).all())
        return blocks.codes.double().abs()

    return values, below, below + 1, share, store


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(lambda: of_bf16(of_moments), id="bf16 in fp32"),
        *(pytest.param(lambda scale=scale: of_bf16(of_weights, scale), id=f"bf16 {scale}") for scale in (1.0, 3e-7)),
        pytest.param(lambda: of_codes(SQUARES), id="squares"),
        pytest.param(lambda: of_codes(FOURTH_POWERS), id="fourth powers"),
    ],
)
def test_either_neighbour_and_the_mean_is_the_value(case):
    """The choice depends neither on the value's last bits, its sign or its size, nor on the choices in other steps."""
    values, below, above, share, round_in_step = case()
    excess, steps = -64 * share, 64
    for step in range(steps):
        result = round_in_step(step)
        assert bool(((result == below) | (result == above) | (share == 0)).all())
        excess += ((result == above) & (above > below)).where(share > 0, 0)
    variance = steps * share * (1 - share)
    odd = values.view(torch.int32) & 1 == 1
    for part in (share >= 0, (share > 0) & (share < 0.1), share > 0.9, values < 0, odd):
        assert abs(float(excess[part].sum())) <= 5 * math.sqrt(float(variance[part].sum()))
    assert float(excess.square().sum() / variance.sum()) == pytest.approx(1, abs=0.05)


def test_what_bf16_holds_stays():
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, largest, -largest, 2.0**-14, 2.0**-24, math.inf, -math.inf])
    nan = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # every bit may be set
    most = torch.tensor([1.0, -1.0]) * torch.finfo(torch.float32).max
    for step in range(50):
        assert torch.equal(of_weights(values, step), values.bfloat16())
        assert bool(of_weights(nan, step).isnan().all())
        assert torch.equal(of_moments(values[:-2], step), values[:-2])
        assert bool(of_moments(most, step).isfinite().all())


# --- Weights


def moved(weights, directions, step=3, **options):
    """Subtract directions from weights."""
    apply_directions_([weights], [directions], [(1.0, -1.0)], step=step, **options)
    return weights


def test_what_rounds_to_the_largest_value_does_not_become_infinite():
    largest = torch.finfo(torch.bfloat16).max
    above = torch.nextafter(torch.tensor(largest), torch.tensor(torch.inf))
    values = torch.stack([above, -above]).repeat(500)
    assert torch.equal(values.bfloat16(), (values.sign() * largest).bfloat16())
    bits = torch.randint(-(2**31), 2**31, values.shape, dtype=torch.int64).to(torch.int32)
    assert torch.equal(round_to_bf16(values, bits), values.bfloat16())
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38])
    rounded = round_to_bf16(odd, bits[:4].clone())
    assert torch.equal(rounded.isnan(), odd.isnan())
    assert rounded[0] == -rounded[1] == rounded[3] == torch.inf


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_codes_do_not_depend_on_torchs_default_dtype(default):
    blocks = torch.rand(40, BLOCK)
    expected = SQUARES.codes_of(blocks, salt(7))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert all(map(torch.equal, SQUARES.codes_of(blocks, salt(7)), expected))
    finally:
        torch.set_default_dtype(before)


def test_equal_weights_with_different_updates_are_rounded_independently():
    # A quarter of the way from 1 to the next value of bf16; what differs is less than half a unit of the sum.
    update = 2**-9 + 2.0**-32 * torch.arange(200)
    assert (1 + update == 1 + 2**-9).all()
    weights = [moved(torch.ones(200, dtype=torch.bfloat16), -update, step) for step in range(400)]
    ups = (torch.stack(weights) > 1).double()
    assert float(ups.mean()) == pytest.approx(0.25, abs=0.01)
    for pairs in (
        ups.view(-1, 2).T,
        torch.stack([ups[:-1].flatten(), ups[1:].flatten()]),
    ):  # of neighbours, and of steps
        assert float(torch.corrcoef(pairs)[0, 1]) == pytest.approx(0, abs=0.03)


def test_nearest_is_a_cast():
    exact, weights = normal(9, 5), torch.zeros(9, 5, dtype=torch.bfloat16)
    moved(weights, -exact, rounding="nearest")
    assert torch.equal(weights, exact.bfloat16())


# --- Codes of 8 bits


@CODES
def test_codes_stand_for_powers_and_the_largest_for_the_scale(code):
    codes = torch.arange(-code.largest if code.dtype.is_signed else 0, code.largest + 1).to(code.dtype)
    fractions = code.fractions(codes)
    exact = codes.double().sign() * (codes.double().abs() / code.largest) ** code.power
    assert ((fractions - exact).abs() <= 2**-22 * exact.abs()).all()
    assert (fractions.diff() > 0).all()
    assert fractions[-1] == 1


@CODES
@given(shape=st.lists(st.integers(1, 5), max_size=2), columns=st.integers(16, 200), zeros=st.booleans())
def test_codes_are_the_nearest_within_each_block(code, shape, columns, zeros):
    values = spread(*shape, columns, code=code)
    if zeros:
        values[..., :BLOCK] = 0
    blocks = Stored(values.shape, code)
    blocks.store_(values)
    for k, block in enumerate(values.split(BLOCK, -1)):
        assert torch.equal(blocks.scales[..., k], block.abs().amax(-1))
    assert bool((blocks.values() * values >= 0).all())
    roots = [
        (tensor.abs() / scales_of(blocks).clamp_min(1e-30)) ** (1 / code.power) for tensor in (blocks.values(), values)
    ]
    off = ((roots[0] - roots[1]).abs() * code.largest)[blocks.codes.float().abs() != 1]  # of fourth powers the least
    assert (off < 0.5 + 1e-3).all()
    again = Stored(values.shape, code)
    again.store_(blocks.values())
    assert torch.equal(again.codes, blocks.codes)
