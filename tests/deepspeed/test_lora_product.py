"""`lora: product` under ZeRO."""

from __future__ import annotations

import pytest

from tests.deepspeed.lora_cases import refusal

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_that_cut_factors_are_refused_at_the_start(ranks, stage):
    words = f"lora_product (lora=product) needs whole factors, and ZeRO-{stage} cuts matrices anywhere. Use ZeRO-0, DDP"
    for error, is_kept in ranks.run(refusal, stage=stage):
        assert error.startswith(words)
        assert is_kept
