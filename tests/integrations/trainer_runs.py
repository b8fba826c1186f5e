"""Runs of Trainer with `optim: muon`, and the same training written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments, get_scheduler

from hf_muon import build_optimizer
from tests.integrations.plain_script import BATCH, LR, OPTIONS, STEPS, InOrder, dataset, model, sentences
from tests.support.reference import relative_difference


class Losses(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))


def arguments(path, **options):
    return TrainingArguments(str(path), **{**OPTIONS, **options})


def train(network, path, resume=None, data=None, trainer_class=InOrder, **options):
    callback = Losses()
    trainer = trainer_class(network, arguments(path, **options), train_dataset=data or dataset(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback.losses


def by_hand(network, *, optimizer=None, accumulation=1, max_grad_norm=1.0, autocast=False, steps=STEPS, **options):
    """Train as the Trainer does, without the Trainer."""
    optimizer = optimizer or build_optimizer(network, lr=LR, weight_decay=0.1, **options)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=steps)
    rows = sentences()
    losses = []
    network.train()
    position = 0
    for _ in range(steps):
        micro = [rows[position + i * BATCH : position + (i + 1) * BATCH] for i in range(accumulation)]
        position += accumulation * BATCH
        predicted = sum(batch[:, 1:].numel() for batch in micro)
        total = 0.0
        for batch in micro:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = network(input_ids=batch, labels=batch, num_items_in_batch=torch.tensor(predicted)).loss
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return optimizer, losses


def assert_same(start, ours, theirs, losses, expected_losses):
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert relative_difference(list(start.parameters()), list(theirs.parameters()), list(ours.parameters())) < 1e-6


def lora(**options):
    import peft

    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian", **options)
    return peft.get_peft_model(model(), config)
