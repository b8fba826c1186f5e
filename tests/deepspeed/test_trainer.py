"""`optim: muon` with `deepspeed:` in TrainingArguments, against the same training written by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from hf_muon import build_optimizer
from tests.bounds import beyond_rounding, move
from tests.deepspeed.trainer_cases import complaint, config_of, train
from tests.distributed.pool import Pool
from tests.integrations.plain_script import BATCH, LR, STEPS, model, sentences

pytestmark = pytest.mark.usefixtures("quiet")

CONFIGS = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]


@functools.cache
def by_hand(accumulation=1, max_grad_norm=0.05, moved=None, **options):
    network = model()
    move(network, moved)
    optimizer = build_optimizer(network, lr=LR, weight_decay=0.1, ns_dtype="fp32", **options)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    network.train()
    rows = iter(sentences().split(BATCH))
    for _ in range(STEPS):
        for batch in [next(rows) for _ in range(accumulation)]:
            (network(input_ids=batch, labels=batch).loss / accumulation).backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm)
        assert norm > 2 * max_grad_norm
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in network.named_parameters()}


@pytest.mark.extended(but="-2$")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_trainer_equals_a_loop_by_hand(ranks, name, accumulation, tmp_path):
    options = {"max_grad_norm": 0.05, "gradient_accumulation_steps": accumulation, "optim_args": "ns_dtype=fp32"}
    controls = [by_hand(accumulation, moved=seed) for seed in (0, 1)]
    for result in ranks.run(train, folder=str(tmp_path), config=config_of(name), **options):
        assert result["optimizer"] == "Muon"
        assert not beyond_rounding(result["weights"], by_hand(accumulation), controls)


@pytest.mark.extended(but="zero1|zero3_offload")
@pytest.mark.parametrize("name", CONFIGS)
def test_resume_is_exact(ranks, name, tmp_path):
    options = {"config": config_of(name), "save_strategy": "steps", "save_steps": 3, "bf16": True}
    straight = ranks.run(train, folder=str(tmp_path), **options)
    path = str(tmp_path / "checkpoint-3")
    for one, other in zip(ranks.run(train, folder=str(tmp_path), resume=path, **options), straight, strict=True):
        assert one["losses"] == other["losses"]
        assert all(torch.equal(one["weights"][n], w) for n, w in other["weights"].items())


@pytest.mark.extended
def test_resume_on_another_number_of_ranks_and_in_another_stage(ranks, tmp_path):
    """Save on two ranks with two rows each and go on with four rows on one, in the order of an uninterrupted run."""
    options = {"max_grad_norm": 0.05, "optim_args": "ns_dtype=fp32", "save_strategy": "steps", "save_steps": 3}
    ranks.run(train, folder=str(tmp_path), config=config_of("zero3_offload"), **options)
    path, rows = str(tmp_path / "checkpoint-3"), {"per_device_train_batch_size": 4}
    alone = Pool(1, timeout=240)
    try:
        (result,) = alone.run(train, folder=str(tmp_path), config=config_of("zero1"), resume=path, **rows, **options)
    finally:
        alone.close()
    assert len(result["losses"]) == STEPS
    assert not beyond_rounding(result["weights"], by_hand(), [by_hand(moved=seed) for seed in (0, 1)])


@pytest.mark.extended(but="zero2")
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_lora(ranks, name, tmp_path):
    options = {"config": config_of(name), "lora": True, "optim_args": "lora=muon,ns_dtype=fp32"}
    one, other = ranks.run(train, folder=str(tmp_path), **options)
    assert one["optimizer"] == "Muon"
    assert all(torch.equal(one["weights"][n], w) for n, w in other["weights"].items())
    trained = [n for n in one["weights"] if "lora_" in n]
    assert len(trained) == 8


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_an_optimizer_in_the_config_is_refused(ranks, optimizer, tmp_path):
    config = {**config_of("zero2"), "optimizer": {"type": optimizer, "params": {"lr": "auto"}}}
    for error in ranks.run(complaint, folder=str(tmp_path), config=config):
        assert f'"optimizer" ({optimizer}), which DeepSpeed would use in place of Muon' in error


def test_what_is_refused_is_refused_before_a_model_is_wrapped(ranks, tmp_path):
    config = config_of("zero3", mics_shard_size=2)
    assert all("MiCS" in error for error in ranks.run(complaint, folder=str(tmp_path), config=config))


def test_a_scheduler_in_the_config(ranks, tmp_path):
    """Use DeepSpeed's own scheduler, which gives all groups one learning rate."""
    config = {
        **config_of("zero2"),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 2}},
    }
    one = ranks.run(train, folder=str(tmp_path), config=config)[0]
    assert one["optimizer"] == "Muon"
    assert one["losses"][-1] < one["losses"][0]
