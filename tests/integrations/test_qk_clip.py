"""`qk_clip` in Trainer: the run of a loop, its logs, resumed, and refused where a rank sees parts of sequences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

from hf_muon import build_optimizer
from hf_muon.integrations.transformers.refusals import refuse_parts_of_sequences
from tests.integrations.plain_script import STEPS
from tests.integrations.trainer_runs import arguments, assert_same, by_hand, train
from tests.rules.attention_models import make

CLIP = 0.1  # some heads are beyond it
ARGUMENTS = f"ns_dtype=fp32,qk_clip={CLIP}"


def model():
    return make("llama")


def test_trainer_clips_as_a_loop_does_and_logs_it(tmp_path):
    ours, theirs = model(), model()
    trainer, losses = train(ours, tmp_path, optim_args=f"{ARGUMENTS},diagnostics_every=1", logging_steps=1)
    optimizer, expected = by_hand(theirs, ns_dtype="fp32", qk_clip=CLIP)
    assert_same(model(), ours, theirs, losses, expected)
    logged = [entry for entry in trainer.state.log_history if "muon/max_logit" in entry]
    assert len(logged) == STEPS
    assert sum(entry["muon/clipped_heads"] for entry in logged) > 0
    without = model()
    by_hand(without, ns_dtype="fp32")
    assert not all(torch.equal(a, b) for a, b in zip(without.parameters(), ours.parameters(), strict=True))
    assert optimizer.param_groups[0]["qk_clip"] == CLIP


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    straight, resumed = model(), model()
    train(straight, tmp_path / "straight", optim_args=ARGUMENTS, save_steps=STEPS // 2, save_strategy="steps")
    half = tmp_path / "straight" / f"checkpoint-{STEPS // 2}"
    train(resumed, tmp_path / "resumed", resume=str(half), optim_args=ARGUMENTS)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_parts_of_sequences_are_refused():
    args = SimpleNamespace(parallelism_config=SimpleNamespace(sp_size=2))
    refuse_parts_of_sequences(args, None)
    with pytest.raises(RuntimeError, match=r"ParallelismConfig\(sp_size\).*Remove qk_clip=100"):
        refuse_parts_of_sequences(args, 100.0)


def test_a_model_that_needs_none_is_refused_before_training(tmp_path):
    trainer = Trainer(make("qwen3"), arguments(tmp_path, optim_args="qk_clip=100"))
    with pytest.raises(ValueError, match="qk_clip=100 is not needed"):
        trainer.create_optimizer()
    assert build_optimizer(make("qwen3"), qk_clip="inf").param_groups[0]["qk_clip"] == float("inf")
