"""`optim: muon` with `deepspeed:` in TrainingArguments, against the same training written by hand."""

from __future__ import annotations

import copy
import functools
import json
import os
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments, get_scheduler

from hf_muon import Muon, build_optimizer
from tests.bounds import beyond_rounding, move
from tests.deepspeed.runs import assert_weights, rank_of_environment, weights_of
from tests.integrations.plain_script import BATCH, LR, OPTIONS, STEPS, InOrder, dataset, model, sentences

pytestmark = pytest.mark.usefixtures("quiet")

EXAMPLES = Path(__file__).parents[2] / "examples" / "deepspeed"
CONFIGS = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]


def config_of(name, **zero):
    """Return one of the example configs."""
    config = json.loads((EXAMPLES / f"{name}.json").read_text())
    config["zero_optimization"].update(zero)
    for kind in ("offload_optimizer", "offload_param"):  # torch cannot pin memory without a GPU
        config["zero_optimization"].get(kind, {}).pop("pin_memory", None)
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["memory_efficient_linear"] = False
    return config


def arguments(folder, config, **options):
    """Return TrainingArguments as in a new process: accelerate and transformers keep a state and a config for each."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    rank_of_environment()
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    args = TrainingArguments(str(folder), **{**OPTIONS, "deepspeed": copy.deepcopy(config), **options})
    deepspeed.init_distributed(dist_backend="gloo")
    return args


def results_of(trainer):
    """Return whole weights and what was logged, and end the engine."""
    engine, logs = trainer.model_wrapped, trainer.state.log_history
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    assert isinstance(optimizer, Muon)
    weights = weights_of(engine.module)
    engine.destroy()
    dist.barrier()
    return {
        "weights": weights,
        "losses": [log["loss"] for log in logs if "loss" in log],
        "norms": [float(log["grad_norm"]) for log in logs if "grad_norm" in log],
    }


def train(rank, folder, config, resume=None, lora=False, **options):
    """Train and return whole weights and losses."""
    args = arguments(folder, config, **{"per_device_train_batch_size": 2, **options})
    network = model()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        own = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        network = get_peft_model(network, own)
    trainer = InOrder(network, args, train_dataset=dataset())
    trainer.train(resume_from_checkpoint=resume)
    return results_of(trainer)


def complaint(rank, training=train, **options):
    """Train and return the error, or None."""
    try:
        training(rank, **options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def by_hand(accumulation=1, max_grad_norm=0.05, moved=None):
    network = model()
    move(network, moved)
    optimizer = build_optimizer(network, lr=LR, weight_decay=0.1, ns_dtype="fp32")
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    network.train()
    rows = iter(sentences().split(BATCH))
    for _ in range(STEPS):
        for batch in [next(rows) for _ in range(accumulation)]:
            (network(input_ids=batch, labels=batch).loss / accumulation).backward()
        assert nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm) > 2 * max_grad_norm
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in network.named_parameters()}


def assert_by_hand(weights, accumulation=1):
    expected, *controls = (by_hand(accumulation, moved=seed) for seed in (None, 0, 1))
    assert not beyond_rounding(weights, expected, controls)


CLIPPED = {"max_grad_norm": 0.05, "optim_args": "ns_dtype=fp32"}


@pytest.mark.promise("zero")
@pytest.mark.first_tier("zero[013]-1|zero2-2|offload-1")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_trainer_equals_a_loop_by_hand(ranks, name, accumulation, tmp_path):
    options = {"folder": str(tmp_path), "config": config_of(name), "gradient_accumulation_steps": accumulation}
    for result in ranks.run(train, **options, **CLIPPED):
        assert_by_hand(result["weights"], accumulation)


@pytest.mark.promise("exact-resume")
@pytest.mark.first_tier("zero1|zero3_offload")
@pytest.mark.parametrize("name", CONFIGS)
def test_resume_is_exact(ranks, name, tmp_path):
    options = {"folder": str(tmp_path), "config": config_of(name), "bf16": True}
    straight = ranks.run(train, save_strategy="steps", save_steps=3, **options)
    for one, other in zip(ranks.run(train, resume=str(tmp_path / "checkpoint-3"), **options), straight, strict=True):
        assert one["losses"] == other["losses"]
        assert_weights(one["weights"], other["weights"])


@pytest.mark.extended
def test_resume_on_another_number_of_ranks_and_in_another_stage(pools, tmp_path):
    """Save on two ranks with two rows each and go on with four rows on one, in the order of an uninterrupted run."""
    options = {"folder": str(tmp_path), "save_strategy": "steps", "save_steps": 3, **CLIPPED}
    pools[2].run(train, config=config_of("zero3_offload"), **options)
    options |= {"resume": str(tmp_path / "checkpoint-3"), "per_device_train_batch_size": 4}
    (result,) = pools[1].run(train, config=config_of("zero1"), **options)
    assert len(result["losses"]) == STEPS
    assert_by_hand(result["weights"])


@pytest.mark.promise("lora")
@pytest.mark.first_tier("zero2")
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_lora(ranks, name, tmp_path):
    options = {"config": config_of(name), "lora": True, "optim_args": "lora=muon,ns_dtype=fp32"}
    one, other = ranks.run(train, folder=str(tmp_path), **options)
    assert_weights(one["weights"], other["weights"])
    assert len([name for name in one["weights"] if "lora_" in name]) == 8


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "[optimizer-in-config]"),
        ({"optimizer": {"type": "Muon", "params": {"lr": "auto"}}}, "[optimizer-in-config]"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "[mics]"),
    ],
    ids=["AdamW", "Muon", "MiCS"],
)
def test_what_is_refused_is_refused_before_a_model_is_wrapped(ranks, config, code, tmp_path):
    for error in ranks.run(complaint, folder=str(tmp_path), config={**config_of("zero2"), **config}):
        assert code in error


def test_a_scheduler_in_the_config(ranks, tmp_path):
    """Use DeepSpeed's own scheduler, which gives all groups one learning rate."""
    rates = {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 2}
    config = {**config_of("zero2"), "scheduler": {"type": "WarmupLR", "params": rates}}
    losses = ranks.run(train, folder=str(tmp_path), config=config)[0]["losses"]
    assert losses[-1] < losses[0]
