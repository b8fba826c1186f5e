"""Starting DeepSpeed with Muon: all ways that DeepSpeed takes, and what is refused (tests/refusals/deepspeed.py)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from hf_muon.integrations.deepspeed.refusals import config_complaints
from tests.deepspeed.runs import (
    OPTIONS,
    assert_weights,
    build_model,
    config_of,
    loss_of,
    rank_of_environment,
    tokens_of,
    weights_of,
)
from tests.refusals import Refusal, check, deepspeed

pytestmark = pytest.mark.usefixtures("quiet")

COMMENTED = "{\n# a comment\n/* and another */\n"


def step_once(rank, folder):
    """Start an engine in each way, step it once, and return its weights."""

    def function(params):
        return build_optimizer(model, OPTIONS)

    results = []
    for way in ("mapping", "file", "hjson", "args", "positional", "function"):
        rank_of_environment()
        model, config, file = build_model(), config_of(1), Path(folder, f"{way} {rank}.json")
        file.write_text(json.dumps(config).replace("{", COMMENTED if way == "hjson" else "{", 1))
        args = argparse.Namespace(local_rank=rank, deepspeed_config=str(file) if way == "args" else None)
        optimizer = function if way == "function" else function(None)
        given = {"model": model, "optimizer": optimizer, "config": config}
        if way == "positional":
            engine, *_ = initialize(args, model, optimizer, config=config)
        else:
            given |= {"file": {"config": str(file)}, "hjson": {"config": file}}.get(way, {})
            given |= {"args": args, "config": None} if way == "args" else {}
            engine, *_ = initialize(**given)
        assert args.deepspeed_config in (None, str(file))
        engine.backward(loss_of(engine, tokens_of(0)))
        engine.step()
        results.append(weights_of(engine.module))
        engine.destroy()
    return results


def test_every_way_of_deepspeed_starts_the_same_run(ranks, tmp_path):
    for expected, *others in ranks.run(step_once, folder=str(tmp_path)):
        for weights in others:
            assert_weights(weights, expected)


@pytest.mark.promise("refused-layouts", "no-silent-fallback")
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=case.marks) for case in deepspeed.CASES])
def test_refused(case: Refusal, request: pytest.FixtureRequest):
    check(case, request)


def test_what_is_said_by_default_is_not_refused():
    zero = {"stage": 3, "mics_shard_size": -1, "zero_hpz_partition_size": 2, "zero_quantized_weights": False}
    cpu = {"reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu", "ratio": 1.0, "pin_memory": True}}
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    for config in (
        {},
        {"zero_optimization": {"stage": 3, **nvme}},
        {"zero_optimization": {**zero, **cpu}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"},
    ):
        assert list(config_complaints(config)) == []
