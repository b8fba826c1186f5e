"""Each rule takes the same step in every layout."""

from __future__ import annotations

import pytest

from tests.distributed.cases import given_gradients
from tests.distributed.test_layouts import assert_equal
from tests.rules.settings import SETTINGS

LAYOUTS = [("ddp", 2), ("fsdp", 3), ("last", 2), ("hsdp", 4), ("fsdp-tp", 4), ("experts", 4)]


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
