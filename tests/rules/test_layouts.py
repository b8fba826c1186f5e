"""Each rule takes the same step in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.cases import VIEWS, given_gradients
from tests.distributed.test_layouts import assert_equal
from tests.distributed.training import factors
from tests.rules.settings import PLAIN, SETTINGS, TOGETHER

LAYOUTS = [("ddp", 2), ("fsdp", 3), ("last", 2), ("hsdp", 4), ("fsdp-tp", 4), ("experts", 4)]
HALF = {"viewed": VIEWS, "dtype": "bfloat16", "momentum_dtype": "int8"}


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_given_equal_gradients_every_layout_gives_the_bits_of_one_process(pools, layout, ranks, name):
    for dtype in ("float32", "bfloat16"):
        expected = given_gradients(0, "single", dtype=dtype, **SETTINGS[name])
        assert_equal(pools[ranks].run(given_gradients, layout=layout, dtype=dtype, **SETTINGS[name]), expected)


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_factors_of_parameters_are_the_same_in_every_layout(pools, layout, ranks):
    for options in ({}, {"dtype": "bfloat16", "weight_decay_mode": "cautious"}):
        expected = given_gradients(0, "single", scaled=True, **options)
        assert_equal(pools[ranks].run(given_gradients, layout=layout, scaled=True, **options), expected)


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
@pytest.mark.parametrize("options", [{}, {**HALF, **TOGETHER}], ids=["plain", "all"])
def test_a_schedule_and_every_other_option_are_the_same_in_every_layout(pools, layout, ranks, options):
    options = {"scaled": True, "scheduled": True, **PLAIN, **options}
    expected = given_gradients(0, "single", **options)
    assert_equal(pools[ranks].run(given_gradients, layout=layout, **options), expected)


@pytest.mark.parametrize("name", ["scaled", "scheduled", *PLAIN, *TOGETHER])
def test_each_of_these_options_matters(name):
    options = {"scaled": True, "scheduled": True, **PLAIN, **TOGETHER}
    others = {key: value for key, value in options.items() if key != name}
    one, other = given_gradients(0, "single", **options), given_gradients(0, "single", **others)
    assert any(not torch.equal(weight, same) for (weight, *_), (same, *_) in zip(one, other, strict=True))


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp", 3), ("hsdp", 4), ("tp", 2), ("fsdp-tp", 4)])
def test_names_are_those_of_the_model_in_every_layout(pools, layout, ranks):
    options = {"lr_scales": {r"^embed": 2.0, r"blocks\.0": 0.5, "qkv": 3.0}}
    expected = factors(0, "single", **options)
    assert set(expected.values()) == {0.5, 1.0, 2.0, 3.0}
    assert all(own == expected for own in pools[ranks].run(factors, layout=layout, **options))
