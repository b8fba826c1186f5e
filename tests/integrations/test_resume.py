"""What a resumed Trainer run says: rates that are ignored, and moments that are not there."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Trainer

from tests.integrations.plain_script import LR, InOrder, dataset, model
from tests.integrations.test_transformers import arguments

RATES = "the checkpoint's learning rates win over those of this run"
FRESH = "the moments start from zero: Trainer has loaded no optimizer state from"


class WithoutInitialRates(InOrder):
    """A schedule that keeps no `initial_lr`, as DeepSpeed's do."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        super().create_scheduler(num_training_steps, optimizer)
        for group in (optimizer or self.optimizer).param_groups:
            group.pop("initial_lr", None)
        return self.lr_scheduler


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    run(InOrder, path, save_strategy="steps", save_steps=2, max_steps=2)
    return path / "checkpoint-2"


def run(cls, path, resume=None, **options) -> Trainer:
    torch.manual_seed(0)
    trainer = cls(model(), arguments(path, **{"max_steps": 3, **options}), train_dataset=dataset())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, None),
        ({"learning_rate": 0.5}, f"Muon's {LR:.6g}, not 0.5; AdamW's {LR:.6g}, not 0.5. "),
        ({"optim_args": "muon_lr=0.7"}, f"Muon's {LR:.6g}, not 0.7. "),
        ({"optim_args": "adamw_lr=0.7"}, f"AdamW's {LR:.6g}, not 0.7. "),
    ],
)
def test_changed_rates_are_named(saved, options, change, tmp_path, caplog):
    caplog.clear()
    run(InOrder, tmp_path, str(saved), **options)
    assert caplog.text.count(RATES) == (change is not None)
    assert change is None or change in caplog.text
    assert FRESH not in caplog.text


def test_without_rates_that_a_schedule_keeps(saved, tmp_path, caplog):
    run(WithoutInitialRates, tmp_path, str(saved), learning_rate=0.5)
    assert caplog.text.count(RATES) == 1


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_moments_says_so_once(saved, missing, tmp_path, caplog):
    import shutil

    folder = shutil.copytree(saved, tmp_path / "checkpoint-2")
    (folder / missing).unlink()
    caplog.clear()
    trainer = run(InOrder, tmp_path, str(folder))
    assert caplog.text.count(FRESH) == 1
    assert str(folder) in caplog.text
    assert all(group["step"] == 1 for group in copy.copy(trainer.optimizer.param_groups))
