"""Factors of the learning rate under ZeRO, whose partitions hold slices of parameters."""

from __future__ import annotations

import pytest
import torch

from tests.deepspeed.cases import train
from tests.deepspeed.test_training import STAGES, assert_equal, assert_resumes, reference

SCALES = r"embed:0.5|norm:2|blocks\.1:0.25"
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("name", ["0", "1", "2-cpu", "3", "3-cpu"])
def test_every_stage_gives_the_bits_of_one_process(ranks, name):
    options = {"dtype": "float32", "lr_scales": SCALES}
    expected = reference(**options)
    assert any(not torch.equal(w, expected["weights"][n]) for n, w in reference(dtype="float32")["weights"].items())
    for result in ranks.run(train, same_data=True, **options, **STAGES[name]):
        assert_equal(result, expected)


@pytest.mark.parametrize("name", ["2", "3"])
def test_resume_is_exact(ranks, name, tmp_path):
    assert_resumes(ranks, str(tmp_path / "checkpoint"), 2, 4, lr_scales=SCALES, **STAGES[name])
