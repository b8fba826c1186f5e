"""What rules learn of Trainer's schedule."""

from __future__ import annotations

import pytest

from tests.integrations.plain_script import STEPS, InOrder, dataset, model
from tests.integrations.trainer_runs import arguments, by_hand, train
from tests.reference import relative_difference

COOLDOWN = "momentum_warmup=2,momentum_cooldown=2,weight_decay_schedule=lr"


def test_trainer_tells_the_number_of_its_steps(tmp_path):
    start, ours, theirs = model(), model(), model()
    trainer, _ = train(ours, tmp_path, optim_args=COOLDOWN)
    assert [group["training_steps"] for group in trainer.optimizer.param_groups] == [STEPS] * 3
    options = {"momentum_warmup": 2, "momentum_cooldown": 2, "weight_decay_schedule": "lr", "training_steps": STEPS}
    by_hand(theirs, **options)
    assert relative_difference(list(start.parameters()), list(theirs.parameters()), list(ours.parameters())) < 1e-6


def test_the_number_that_the_user_says_holds(tmp_path):
    trainer, _ = train(model(), tmp_path, optim_args=f"{COOLDOWN},training_steps=70", max_steps=1)
    assert {group["training_steps"] for group in trainer.optimizer.param_groups} == {70}


def test_other_runs_are_told_nothing(tmp_path):
    trainer, _ = train(model(), tmp_path, max_steps=1)
    assert {group["training_steps"] for group in trainer.optimizer.param_groups} == {None}


def test_a_scheduler_without_a_peak_is_refused(tmp_path):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 0, "eval_strategy": "steps"}
    args = arguments(tmp_path, optim_args="weight_decay_schedule=lr", **options)
    trainer = InOrder(model(), args, train_dataset=dataset(), eval_dataset=dataset(8))
    with pytest.raises(RuntimeError, match=r"weight_decay_schedule=lr follows .* ReduceLROnPlateau does not write"):
        trainer.train()
