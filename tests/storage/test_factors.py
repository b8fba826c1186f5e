"""Factors of the learning rate: lists in param groups, and texts in their place in state dicts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_muon.storage.factors import KEY, factors_of, list_complaint, with_texts


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=5))
def test_a_text_stands_for_its_list_in_state_dicts_alone(factors):
    count = len(factors)
    group = {"params": list(range(count)), KEY: factors}
    (saved,) = with_texts({"param_groups": [group]})["param_groups"]
    assert factors_of(saved) == factors_of(group) == factors
    assert list_complaint(saved[KEY]) is list_complaint(factors) is list_complaint(factors, count) is None
    assert list_complaint(saved[KEY], count) is not None
    assert list_complaint(factors, count + 1) is not None


@pytest.mark.parametrize("wrong", ["a|b", "0.5|-1.0", [0.5, -1], [True], [math.inf], [math.nan], 3])
def test_factors_are_finite_numbers_of_at_least_zero(wrong):
    assert list_complaint(wrong) is not None


def test_no_list_is_a_factor_of_one_for_each_parameter():
    assert list_complaint(None) is list_complaint(None, 3) is None
    assert factors_of({"params": [0, 1, 2]}) == [1.0] * 3
