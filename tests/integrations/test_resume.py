"""A resumed Trainer run is bit-identical to the uninterrupted one, or it warns or raises an error."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from transformers import Trainer

from tests.integrations.plain_script import LR, InOrder, dataset, model
from tests.integrations.trainer_runs import arguments, lora, train
from tests.reference import relative_difference

SAVE = {"save_strategy": "steps", "save_steps": 3}


class TestResume:
    @pytest.mark.promise("exact-resume")
    @pytest.mark.parametrize(
        ("dtype", "optim_args"),
        [
            (torch.float32, "ns_dtype=fp32"),
            (torch.bfloat16, "ns_dtype=fp32"),
            (torch.float32, "ns_dtype=fp32,momentum_dtype=bf16,adamw_state_dtype=bf16"),
            (torch.bfloat16, "ns_dtype=fp32,momentum_dtype=int8,adamw_state_dtype=int8"),
        ],
    )
    def test_is_bit_exact(self, tmp_path, dtype, optim_args):
        straight, second = model(dtype), model(dtype)
        _, losses = train(straight, tmp_path, optim_args=optim_args, **SAVE)
        trainer, resumed = train(second, tmp_path / "on", resume=str(tmp_path / "checkpoint-3"), optim_args=optim_args)
        assert resumed[-3:] == losses[3:]
        for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b), name
        dtypes = {value.dtype for state in trainer.optimizer.state.values() for value in state.values()}
        if "int8" in optim_args:
            assert dtypes == {torch.int8, torch.uint8, torch.float32}
        else:
            assert dtypes == {torch.float32, *([torch.bfloat16] if "bf16" in optim_args else [])}

    @pytest.mark.parametrize("names", [("muon", "hf_muon"), ("hf_muon", "muon")], ids=" then ".join)
    def test_under_the_other_name(self, tmp_path, names):
        """Save a checkpoint under one name of `optim` and resume under the other one."""
        straight, second = model(), model()
        train(straight, tmp_path, optim=names[0], **SAVE)
        train(second, tmp_path / "on", resume=str(tmp_path / "checkpoint-3"), optim=names[1])
        assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))

    def test_lora_is_bit_exact(self, tmp_path):
        straight, second = lora(), lora()
        train(straight, tmp_path, optim_args="lora=muon", **SAVE)
        train(second, tmp_path / "on", resume=str(tmp_path / "checkpoint-3"), optim_args="lora=muon")
        for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b), name

    def test_shows_when_the_momentum_is_lost(self, tmp_path):
        """Show that the comparison above fails without the moments."""
        straight, second = model(), model()
        train(straight, tmp_path, **SAVE)
        checkpoint = tmp_path / "checkpoint-3"
        saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        for state in saved["state"].values():
            for value in state.values():
                value.zero_()
        torch.save(saved, checkpoint / "optimizer.pt")
        train(second, tmp_path / "on", resume=str(checkpoint))
        start = model()
        params = [list(network.parameters()) for network in (start, straight, second)]
        assert relative_difference(*params) > 1e-2

    def test_checkpoint_of_another_optimizer(self, tmp_path):
        train(model(), tmp_path, optim="adamw_torch", save_strategy="steps", save_steps=3, max_steps=3)
        with pytest.raises(ValueError, match="written by another optimizer"):
            train(model(), tmp_path, resume=str(tmp_path / "checkpoint-3"))

    def test_checkpoint_of_another_routing(self, tmp_path, saved):
        words = r"the routing changed for model.layers.0.mlp.down_proj.weight \(Muon there"
        with pytest.raises(ValueError, match=words):
            train(model(), tmp_path, resume=str(saved), optim_args="adamw_patterns=down_proj")

    def test_truncated_checkpoint(self, tmp_path, saved):
        folder = shutil.copytree(saved, tmp_path / saved.name)
        (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:1000])
        with pytest.raises(RuntimeError):
            train(model(), tmp_path, resume=str(folder))


RATES = "the checkpoint's learning rates win over those of this run"
FRESH = "the moments start from zero: Trainer has loaded no optimizer state"


class WithoutInitialRates(InOrder):
    """A Trainer whose schedule, like DeepSpeed's, stores no `initial_lr`."""

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
    folder = shutil.copytree(saved, tmp_path / "checkpoint-2")
    (folder / missing).unlink()
    caplog.clear()
    trainer = run(InOrder, tmp_path, str(folder))
    assert caplog.text.count(FRESH) == 1
    assert all(group["step"] == 1 for group in copy.copy(trainer.optimizer.param_groups))
