"""Training with `qk_clip` under ZeRO, on ranks of a pool, and the same in one process."""

from __future__ import annotations

import deepspeed
import torch.distributed as dist

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.cases import config_of, rank_of_environment
from tests.rules.attention_models import enlarge, make, tokens

OPTIONS = {"lr": 0.0, "qk_clip": 2.0, "ns_dtype": "fp32"}
BATCH = 8


def started(name):
    model = make(name)
    enlarge(model, name, 1, 2, 1e5)
    return model


def alone(name, steps):
    """Train in one process; return weights, and the largest logits and the number of rescaled heads of each step."""
    model = started(name)
    optimizer = build_optimizer(model, **OPTIONS)
    measured = keep_results(optimizer)
    for step in range(steps):
        ids = tokens(step, batch=BATCH)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, measured


def under_zero(rank, name, steps, stage, zero=None):
    """Train under ZeRO; return whole weights, and what `alone` returns of each step."""
    rank_of_environment()
    deepspeed.zero.Init.param_id = 0
    model = started(name)
    optimizer = build_optimizer(model, **OPTIONS)
    measured = keep_results(optimizer)
    # Or linear layers round differently for as long as the process lives, in other tests too.
    zero = {**({"memory_efficient_linear": False} if stage == 3 else {}), **(zero or {})}
    config = config_of(stage, "float32", 1, None, zero) | {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size()
    }
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    for step in range(steps):
        ids = tokens(step, batch=BATCH).chunk(dist.get_world_size())[rank]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    weights = {}
    for n, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            weights[n] = param.detach().clone()
    engine.destroy()
    return weights, measured


def keep_results(optimizer):
    """Return a list to which each whole step adds the largest logits and the number of rescaled heads."""
    measured, finish = [], optimizer.head_rules.finish

    def keep(*args, complete=True):
        result = finish(*args, complete=complete)
        if complete and result[0]:
            measured.append(result)
        return result

    optimizer.head_rules.finish = keep
    return measured
