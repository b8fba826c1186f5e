"""`qk_clip` under ZeRO: rows of flat partitions, and of columns where a weight is transposed, as in one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.runs import STAGES, config_of, rank_of_environment, weights_of
from tests.rules.attention_models import enlarge, make, tokens

pytestmark = pytest.mark.usefixtures("quiet")

STEPS, BATCH = 3, 8


def start(name):
    """Return a model with a head that is too large, its optimizer, and a list of each step's largest logits and counts.

    The learning rate is 0, so that only the clip changes weights.
    """
    model = make(name)
    enlarge(model, name, 1, 2, 1e5)
    optimizer = build_optimizer(model, lr=0.0, qk_clip=2.0, ns_dtype="fp32")
    measured, finish = [], optimizer.head_rules.finish

    def keep(*args, complete=True):
        result = finish(*args, complete=complete)
        if complete and result[0]:
            measured.append(result)
        return result

    optimizer.head_rules.finish = keep
    return model, optimizer, measured


@functools.cache
def alone(name):
    model, optimizer, measured = start(name)
    for step in range(STEPS):
        ids = tokens(step, batch=BATCH)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return weights_of(model), measured


def under_zero(rank, name, stage, zero=None):
    """Train under ZeRO; return what `alone` returns."""
    rank_of_environment()
    model, optimizer, measured = start(name)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config_of(stage, zero=zero))
    for step in range(STEPS):
        ids = tokens(step, batch=BATCH).chunk(dist.get_world_size())[rank]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    weights = weights_of(engine.module)
    engine.destroy()
    return weights, measured


@pytest.mark.first_tier("3-cpu-llama|^2-gpt2")
@pytest.mark.parametrize("model", ["llama", "gpt2", "deepseek"])
@pytest.mark.parametrize("name", ["0", "1", "2", "2-cpu", "3", "3-cpu"])
def test_every_stage_rescales_the_rows_of_one_process(ranks, name, model):
    expected, measured = alone(model)
    assert measured[0][1] >= 1
    for weights, own in ranks.run(under_zero, name=model, **STAGES[name]):
        for (largest, count), (mine, counted) in zip(measured, own, strict=True):
            assert counted == count
            assert mine == pytest.approx(largest, rel=1e-5)
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-7)
