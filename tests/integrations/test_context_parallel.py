"""What Trainer's context parallel computes wrongly is refused; `tests/e2e/test_trainer_layouts.py` runs the rest."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_muon._autoload import apply
from hf_muon.integrations.transformers import context_parallel


def trainer(**changes):
    usual = {
        "accelerator": SimpleNamespace(parallelism_config=SimpleNamespace(cp_size=2)),
        "args": SimpleNamespace(optim="muon"),
        "compute_loss_func": None,
        "label_smoother": None,
        "model_accepts_loss_kwargs": True,
        "model": nn.Linear(2, 2),
    }
    return SimpleNamespace(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute_loss_func": print}, "compute_loss_func is called with a part of each sequence"),
        ({"label_smoother": print}, "label_smoothing_factor shifts labels within a part"),
        ({"model_accepts_loss_kwargs": False}, "Linear takes no num_items_in_batch"),
    ],
)
def test_losses_that_need_more_than_a_ranks_tokens_are_refused(changes, message):
    context_parallel.refuse_loss(trainer())
    with pytest.raises(RuntimeError, match=message):
        context_parallel.refuse_loss(trainer(**changes))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": [[1, 1, 1, 0], [1, 1, 1, 1]], "position_ids": [[0, 1, 2, 3]]}, None),
        ({"attention_mask": [[0, 1, 1, 1], [1, 1, 1, 1]]}, "padding in front of tokens"),
        ({"position_ids": [[0, 1, 0, 1]]}, "position_ids start again within a sequence"),
    ],
)
def test_masks_other_than_the_causal_one_are_refused(inputs, message):
    inputs = {name: torch.tensor(rows) for name, rows in inputs.items()}
    if message is None:
        context_parallel.refuse_batch(inputs)
    else:
        with pytest.raises(RuntimeError, match=message):
            context_parallel.refuse_batch(inputs)


def test_a_loss_of_the_trainers_own_is_refused():
    module = SimpleNamespace(Trainer=type("Base", (), {}))
    module.Trainer.compute_loss = lambda self, model, inputs: 1.0
    module.Trainer.training_step = lambda self, model, inputs: self.compute_loss(model, inputs)
    apply(context_parallel.patch_trainer, module)
    own = type("Own", (module.Trainer,), {"compute_loss": lambda self, model, inputs: 2.0})
    calls = type(
        "Calls", (module.Trainer,), {"compute_loss": lambda self, m, x: module.Trainer.compute_loss(self, m, x)}
    )
    for kind in (own, calls):
        instance = kind()
        vars(instance).update(vars(trainer()))
        if kind is calls:
            assert instance.training_step(None, {}) == 1.0
        else:
            with pytest.raises(RuntimeError, match=r"Own.compute_loss does not call Trainer.compute_loss"):
                instance.training_step(None, {})


def test_the_loss_of_trls_sft_is_known():
    sft = pytest.importorskip("trl").SFTTrainer
    assert "compute_loss" in vars(sft)
    assert context_parallel.has_known_loss(type("Mine", (sft,), {}))
    assert not context_parallel.has_known_loss(type("Mine", (sft,), {"compute_loss": print}))
    assert not context_parallel.has_known_loss(Trainer)


def test_trainer_has_the_check():
    assert Trainer.training_step.__wrapped__
