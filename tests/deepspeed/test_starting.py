"""Starting DeepSpeed with Muon: all ways that DeepSpeed takes, and engines that Muon does not know."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import deepspeed
import pytest
import torch
from torch import nn

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import attach, initialize
from hf_muon.integrations.deepspeed.refusals import config_complaints
from tests.deepspeed.runs import (
    OPTIONS,
    assert_weights,
    build_model,
    config_of,
    engine_of,
    loss_of,
    rank_of_environment,
    tokens_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("quiet")

WAYS = ("mapping", "file", "hjson", "args", "positional", "function")


def step_once(rank, folder):
    """Start an engine in each of WAYS, step it once, and return its weights."""
    results = []
    for way in WAYS:
        rank_of_environment()
        model, config = build_model(), config_of(1)
        optimizer = build_optimizer(model, OPTIONS)
        text = json.dumps(config)
        args = argparse.Namespace(local_rank=rank, deepspeed_config=None)
        keywords = {"model": model, "optimizer": optimizer}
        file = Path(folder, f"{way} {rank}.json")
        file.write_text(text.replace("{", "{\n# a comment\n/* and another */\n", 1) if way == "hjson" else text)
        if way == "args":
            args.deepspeed_config = str(file)
            engine, *_ = initialize(args=args, **keywords)
            assert args.deepspeed_config == str(file)
        elif way in ("file", "hjson"):
            engine, *_ = initialize(config=str(file) if way == "file" else file, **keywords)
        elif way == "positional":
            engine, *_ = initialize(args, model, optimizer, config=config)
        else:
            given = optimizer if way == "mapping" else lambda params, model=model: build_optimizer(model, OPTIONS)
            engine, *_ = initialize(model=model, optimizer=given, config=config)
        engine.backward(loss_of(engine, tokens_of(0)))
        engine.step()
        results.append(weights_of(engine.module))
        engine.destroy()
    return results


def test_every_way_of_deepspeed_starts_the_same_run(ranks, tmp_path):
    for expected, *others in ranks.run(step_once, folder=str(tmp_path)):
        for weights in others:
            assert_weights(weights, expected)


def test_a_config_that_is_refused_is_left_as_it_was():
    model, config = nn.Linear(4, 3), {"zero_optimization": {"stage": 1, "zenflow": {"topk_ratio": 0.1}}}
    before = json.dumps(config)
    with pytest.raises(RuntimeError, match=r"\[zenflow\]"):
        initialize(model=model, optimizer=build_optimizer(model, muon_patterns="weight"), config=config)
    assert json.dumps(config) == before


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


# --- engines


def complaint(rank, fault, stage=2, **options):
    """Return the error of a start, or of the first step, with a fault; None if there is no error."""
    try:
        if fault == "started without us":
            rank_of_environment()
            model = build_model()
            optimizer = build_optimizer(model, OPTIONS)
            config = config_of(stage) | {"zero_allow_untested_optimizer": True}
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        else:
            engine, optimizer = engine_of(stage, **options)
        wrapper = engine.optimizer
        if fault == "swapped":
            kind = type("DeepSpeedCPUAdam", (torch.optim.AdamW,), {})  # the real one takes minutes to compile
            wrapper.optimizer = kind(wrapper.optimizer.param_groups[0]["params"])
        elif fault == "subclass":
            wrapper.__class__ = type("OtherZeroOptimizer", (type(wrapper),), {})
        elif fault == "renamed":
            name = "fp16_groups" if stage == 3 else "bit16_groups_flat"
            setattr(wrapper, name + "_", wrapper.__dict__.pop(name))
        elif fault == "moved" and rank == 1:
            flat = next(iter(optimizer.partitioned.partitions))
            flat.data.copy_(flat.data.roll(1))
        if fault != "started without us":
            attach(engine, optimizer)
        engine.backward(loss_of(engine, tokens_of(0)))
        engine.step()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


FAULTS = {
    "started without us": "initialize.*[replaced-by-flat]",
    "swapped": "DeepSpeedCPUAdam.*[other-optimizer]",
    "subclass": "OtherZeroOptimizer.*[unknown-zero-layout]",
    "renamed": "[unknown-zero-layout]",
    "moved": "weight.*[unknown-zero-layout]",
}


@pytest.mark.first_tier("^2")
@pytest.mark.parametrize(
    ("stage", "fault"), [*((2, fault) for fault in FAULTS), *((3, fault) for fault in ("subclass", "renamed", "moved"))]
)
def test_an_engine_or_a_layout_that_is_not_known(ranks, fault, stage):
    one, other = ranks.run(complaint, fault=fault, stage=stage)
    words, code = FAULTS[fault].rsplit("[", 1)
    assert re.search(f"{words}.*\\[{code}", one, re.DOTALL)
    assert one == other
