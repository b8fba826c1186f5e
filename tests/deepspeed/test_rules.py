"""Rules under ZeRO: every stage against one process, and resumed."""

from __future__ import annotations

import pytest
import torch

from tests.deepspeed.cases import train
from tests.deepspeed.resharding_cases import chain, straight
from tests.deepspeed.test_resharding import CPU, assert_same
from tests.deepspeed.test_scales import SCALES
from tests.deepspeed.test_training import STAGES, assert_equal, assert_same_state, reference
from tests.rules.settings import PLAIN, TOGETHER

FACTORS = {"lr_scales": SCALES}
ALL = {"scheduled": True, **FACTORS, **PLAIN, **TOGETHER}
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.extended(but="2-cpu")
@pytest.mark.parametrize("name", ["0", "1", "2-cpu", "3", "3-cpu"])
def test_every_stage_gives_the_bits_of_one_process_and_resumes(ranks, name, tmp_path):
    options = {"same_data": True, "viewed": True, "dtype": "bfloat16", **ALL, **STAGES[name]}
    expected = reference(last=6, viewed=True, dtype="bfloat16", **ALL)
    straight = ranks.run(train, last=6, **options)
    for result in straight:
        assert_equal(result, expected)
        assert any("row_second_moment" in state and state["row_second_moment"].any() for state in result["state"])
    ranks.run(train, last=3, save=str(tmp_path), **options)
    for one, other in zip(ranks.run(train, first=3, last=6, load=str(tmp_path), **options), straight, strict=True):
        assert_equal(one, {**other, "losses": other["losses"][3:]})
        assert_same_state(one, other)


@pytest.mark.parametrize("name", ["scheduled", *FACTORS, *PLAIN])
def test_each_option_matters(name):
    options = {"last": 6, "viewed": True, "dtype": "bfloat16"}
    one = reference(**options, **ALL)["weights"]
    other = reference(**options, **{key: value for key, value in ALL.items() if key != name})["weights"]
    assert any(not torch.equal(weight, other[key]) for key, weight in one.items())


def test_state_of_rules_moves_between_stages(ranks, tmp_path):
    """Go through stages; the state of each parameter is that of the uninterrupted run."""
    options = {"dtype": "bfloat16", "viewed": True, **TOGETHER}
    expected = ranks.run(straight, last=4, **options)[0]
    path = None
    for step, layout in enumerate([{"stage": 2}, {"stage": 3, "zero": CPU}, {"stage": 0}, {"stage": 1}]):
        target = str(tmp_path / str(step))
        for result in ranks.run(chain, load=path, save=target, first=step, last=step + 1, **layout, **options):
            assert_same(result["loaded"], expected["states"][step])
            assert_same(result["saved"], expected["states"][step + 1])
        path = target
