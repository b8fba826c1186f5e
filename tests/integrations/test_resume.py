"""A resumed Trainer run is bit-identical to the uninterrupted one, or it warns or raises an error."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch

from tests.integrations.plain_script import LR, InOrder, model
from tests.integrations.trainer_runs import lora, train
from tests.rules.attention_models import make
from tests.support.reference import relative_difference

pytestmark = pytest.mark.every_stack

half = functools.partial(model, torch.bfloat16)
FEW_BITS = "ns_dtype=fp32,momentum_dtype=int8,adamw_state_dtype=int8"
# A model, options, what the resumed run has in their place, and the dtypes of moments.
RUNS = {
    "fp32": (model, {"optim_args": "ns_dtype=fp32"}, {}, {torch.float32}),
    "bf16": (half, {"optim_args": "ns_dtype=fp32"}, {}, {torch.float32}),
    "bf16 moments": (
        model,
        {"optim_args": "ns_dtype=fp32,momentum_dtype=bf16,adamw_state_dtype=bf16"},
        {},
        {torch.float32, torch.bfloat16},
    ),
    "bf16, int8 moments": (half, {"optim_args": FEW_BITS}, {}, {torch.int8, torch.uint8, torch.float32}),
    "muon then hf_muon": (model, {}, {"optim": "hf_muon"}, {torch.float32}),
    "hf_muon then muon": (model, {"optim": "hf_muon"}, {"optim": "muon"}, {torch.float32}),
    "lora": (lora, {"optim_args": "lora=muon"}, {}, {torch.float32}),
    "qk_clip": (functools.partial(make, "llama"), {"optim_args": "ns_dtype=fp32,qk_clip=0.1"}, {}, {torch.float32}),
}


@pytest.mark.promise("exact-resume")
@pytest.mark.parametrize("name", RUNS)
def test_is_bit_exact(tmp_path, name):
    make_model, options, changes, dtypes = RUNS[name]
    straight, second = make_model(), make_model()
    _, losses = train(straight, tmp_path, save_strategy="steps", save_steps=3, **options)
    checkpoint = tmp_path / "checkpoint-3"
    trainer, resumed = train(second, tmp_path / "on", resume=str(checkpoint), **options | changes)
    assert resumed[-3:] == losses[3:]
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))
    assert {value.dtype for state in trainer.optimizer.state.values() for value in state.values()} == dtypes
    if name == "fp32":  # the comparison fails without the moments
        saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        for state in saved["state"].values():
            for value in state.values():
                value.zero_()
        torch.save(saved, checkpoint / "optimizer.pt")
        lost = model()
        train(lost, tmp_path / "lost", resume=str(checkpoint), **options)
        params = [list(network.parameters()) for network in (model(), straight, lost)]
        assert relative_difference(*params) > 1e-2


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
    train(model(), path, save_strategy="steps", save_steps=2, max_steps=2)
    return path / "checkpoint-2"


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, None),
        ({"learning_rate": 0.5}, f"Muon's {LR:.6g}, not 0.5; AdamW's {LR:.6g}, not 0.5. "),
        ({"optim_args": "muon_lr=0.7"}, f"Muon's {LR:.6g}, not 0.7. "),
        ({"learning_rate": 0.5, "trainer_class": WithoutInitialRates}, ""),
    ],
)
def test_changed_rates_are_named(saved, options, change, tmp_path, caplog):
    caplog.clear()
    train(model(), tmp_path, resume=str(saved), max_steps=3, **options)
    assert caplog.text.count(RATES) == (change is not None)
    assert (change or "") in caplog.text
    assert FRESH not in caplog.text


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_moments_says_so_once(saved, missing, tmp_path, caplog):
    folder = shutil.copytree(saved, tmp_path / "checkpoint-2")
    (folder / missing).unlink()
    caplog.clear()
    trainer, _ = train(model(), tmp_path, resume=str(folder), max_steps=3)
    assert caplog.text.count(FRESH) == 1
    assert all(group["step"] == 1 for group in trainer.optimizer.param_groups)


def test_a_checkpoint_that_does_not_fit_is_refused(saved, tmp_path):
    """Break a file and change a run: Trainer passes on the errors, which tests of `load_state_dict` look at."""
    with pytest.raises(ValueError, match=r"routing changed for model.layers.0.mlp.down_proj.weight \(Muon there"):
        train(model(), tmp_path, resume=str(saved), optim_args="adamw_patterns=down_proj")
    folder = shutil.copytree(saved, tmp_path / saved.name)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:1000])
    with pytest.raises(RuntimeError):
        train(model(), tmp_path, resume=str(folder))
