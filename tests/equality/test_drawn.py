"""Models, placements and options that hypothesis draws, and shrinks where results are not those of one process."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.equality.drawn import compare, models


@pytest.mark.extended
@pytest.mark.second_tier("2")
@pytest.mark.parametrize("ranks", [2, 4])
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_placement_gives_the_bits_of_one_process(pools, ranks, data):
    drawn = data.draw(models(ranks))
    for differences in pools[ranks].run(compare, drawn=drawn):
        assert differences == []
