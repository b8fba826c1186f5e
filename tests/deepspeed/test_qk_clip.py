"""`qk_clip` under ZeRO: rows of flat partitions, and of columns where a weight is transposed, as in one process."""

from __future__ import annotations

import pytest
import torch

from tests.deepspeed.qk_clip_cases import alone, under_zero
from tests.deepspeed.test_training import STAGES

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.extended(but="3-cpu-llama|2-gpt2")
@pytest.mark.parametrize("model", ["llama", "gpt2", "deepseek"])
@pytest.mark.parametrize("name", ["0", "1", "2", "2-cpu", "3", "3-cpu"])
def test_every_stage_rescales_the_rows_of_one_process(ranks, name, model):
    expected, measured = alone(model, 3)
    assert measured[0][1] >= 1
    for weights, own in ranks.run(under_zero, name=model, steps=3, **STAGES[name]):
        assert [count for _, count in own] == [count for _, count in measured]
        for (largest, _), (mine, _) in zip(measured, own, strict=True):
            assert mine == pytest.approx(largest, rel=1e-5)
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-7)
