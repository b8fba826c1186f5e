"""The ways in which scripts call DeepSpeed's `initialize`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.cases import OPTIONS, config_of, rank_of_environment
from tests.deepspeed.models import build_model, loss_of
from tests.distributed.training import batches

WAYS = ("mapping", "file", "hjson", "args", "positional", "function")


def step_once(rank, way, folder):
    """Start an engine in one of WAYS, step it once, and return its weights."""
    rank_of_environment()
    model, config = build_model(), config_of(1, "float32", 1, None, {})
    optimizer = build_optimizer(model, OPTIONS)
    text = json.dumps(config)
    args = argparse.Namespace(local_rank=rank, deepspeed_config=None)
    keywords = {"model": model, "optimizer": optimizer}
    if way == "mapping":
        engine, *_ = initialize(config=config, **keywords)
    elif way in ("file", "hjson", "args"):
        file = Path(folder, f"{way} {rank}.json")
        file.write_text(text.replace("{", "{\n# a comment\n/* and another */\n", 1) if way == "hjson" else text)
        if way == "args":
            args.deepspeed_config = str(file)
            engine, *_ = initialize(args=args, **keywords)
            assert args.deepspeed_config == str(file)
        else:
            engine, *_ = initialize(config=str(file) if way == "file" else file, **keywords)
    elif way == "positional":
        engine, *_ = initialize(args, model, optimizer, config=config)
    else:
        engine, *_ = initialize(model=model, optimizer=lambda params: build_optimizer(model, OPTIONS), config=config)
    engine.backward(loss_of(engine, batches(0)[:4]))
    engine.step()
    weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.destroy()
    return weights
