"""What `get_optimizer_cls_and_kwargs` returns, called as programs around Trainer call it.

The calls are our imitation; `tests/e2e/test_installed_programs.py` has sentence-transformers itself.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_muon import Muon, build_optimizer
from tests.integrations.plain_script import LR, InOrder, dataset, model
from tests.integrations.trainer_runs import arguments, assert_same, by_hand, lora, train
from tests.support.reference import relative_difference

pytestmark = pytest.mark.every_stack

DECAY = 0.1
SLOW = LR / 10


def decay_groups(network, weight_decay, pairs=None, **options):
    """Return the groups with and without decay, as transformers makes them."""
    decaying = Trainer.get_decay_parameter_names(None, network)
    pairs = list(network.named_parameters() if pairs is None else pairs)
    return [
        {"params": [p for n, p in pairs if (n in decaying) is decays], "weight_decay": weight_decay * decays, **options}
        for decays in (True, False)
    ]


def split(network, *words):
    """Return names and parameters of which none of the words is part, and the others."""
    pairs = list(network.named_parameters())
    return [[(n, p) for n, p in pairs if any(word in n for word in words) is has] for has in (False, True)]


def several_rates(trainer):
    """As ms-swift does for `vit_lr` and `aligner_lr`: here the first layer is slower."""
    rest, first = split(trainer.model, ".layers.0.")
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    groups = decay_groups(trainer.model, DECAY, first, lr=SLOW)
    return cls([*groups, *decay_groups(trainer.model, DECAY, rest, lr=trainer.args.learning_rate)], **kwargs)


def rate_read(trainer):
    """As axolotl does for `embedding_lr` and `lr_groups`: the groups take `kwargs["lr"]`."""
    cls, kwargs = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    rest, embeddings = split(trainer.model, "embed_tokens", "lm_head")
    slow = {"params": [p for _, p in embeddings], "weight_decay": 0.0, "lr": SLOW}
    empty = {"params": [], "weight_decay": 0.0, "lr": kwargs["lr"]}
    return cls([*decay_groups(trainer.model, DECAY, rest, lr=kwargs["lr"]), slow, empty], **kwargs)


def rate_and_decay_read(trainer):
    """As Unsloth does for `embedding_learning_rate`: no model, and one decay for all."""
    cls, kwargs = InOrder.get_optimizer_cls_and_kwargs(trainer.args)
    own = {"weight_decay": kwargs["weight_decay"]}
    rest, special = ([p for _, p in pairs] for pairs in split(trainer.model, "embed_tokens"))
    return cls([{"params": rest, "lr": kwargs["lr"], **own}, {"params": special, "lr": SLOW, **own}], **kwargs)


def rate_taken_out(trainer):
    """As scripts do that pass a rate themselves, or copied `create_optimizer`, and LLaMA-Factory's PPO."""
    cls, kwargs = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    assert not {"params", "model", "optimizer_dict"} & kwargs.keys()
    lr = kwargs.pop("lr", None)
    kwargs.pop("weight_decay", None)
    return cls(params=decay_groups(trainer.model, DECAY), lr=lr, **kwargs)


def calling(shape):
    """Return a Trainer that makes its optimizer in such a way."""

    class Calling(InOrder):
        def create_optimizer(self, model=None):
            self.optimizer = shape(self)
            return self.optimizer

    return Calling


def by_routes(network, **changes):
    """Return a `Muon` with a group for each parameter, routed by `build_optimizer`, and changed by name."""
    groups = []
    for group in build_optimizer(network, lr=LR, weight_decay=DECAY).param_groups:
        options = {key: group[key] for key in ("use_muon", "lr", "weight_decay")}
        for i, (name, param) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            view = {"views": [group["views"][i]]} if "views" in group else {}
            own = next((change for word, change in changes.items() if word in name), {})
            groups.append({"params": [(name, param)], **view, **options, **own})
    return Muon(groups)


def facts(optimizer, key="lr"):
    return {
        name: (group["use_muon"], group[key], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


NO_DECAY = {"weight_decay": 0.0, "lr": SLOW}


@pytest.mark.promise("unsloth", "ms-swift", "axolotl")
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (several_rates, {".layers.0.": {"lr": SLOW}}),
        (rate_read, {"embed_tokens": NO_DECAY, "lm_head": NO_DECAY}),
        (rate_and_decay_read, {"embed_tokens": {"lr": SLOW}, "norm": {"weight_decay": DECAY}}),
        (rate_taken_out, {}),
    ],
)
def test_trains_as_groups_written_by_hand_and_resumes_exactly(tmp_path, shape, changes):
    start, ours, theirs, resumed = model(), model(), model(), model()
    own = {"trainer_class": calling(shape)}
    trainer, losses = train(ours, tmp_path, save_strategy="steps", save_steps=3, **own)
    optimizer = by_routes(theirs, **changes)
    expected_facts = facts(optimizer)
    _, expected = by_hand(theirs, optimizer=optimizer)
    assert_same(start, ours, theirs, losses, expected)
    assert facts(trainer.optimizer, "initial_lr") == expected_facts
    assert {lr for _, lr, _ in facts(trainer.optimizer).values()} == {0.0}  # the schedule has ended
    train(resumed, tmp_path / "on", resume=str(tmp_path / "checkpoint-3"), **own)
    assert_equal(ours, resumed)


def test_rate_of_muon_is_in_proportion(tmp_path):
    """Scale a group's rate by `muon_lr` and `adamw_lr`, exactly where it is `lr` itself."""
    options = {"learning_rate": 3e-4, "optim_args": "muon_lr=7e-4,adamw_lr=1.1e-4"}
    trainer = calling(rate_read)(model(), arguments(tmp_path, **options), train_dataset=dataset())
    rates = {(use_muon, lr) for use_muon, lr, _ in facts(trainer.create_optimizer()).values()}
    assert rates == {(True, 7e-4), (False, 1.1e-4), (False, SLOW * 1.1e-4 / 3e-4)}


def test_lora_plus_of_peft(tmp_path):
    """Call peft's own LoRA+, as axolotl does."""
    from peft.optimizers import create_loraplus_optimizer

    network = lora()
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim_args="lora=muon"), network)
    optimizer = create_loraplus_optimizer(network, cls, loraplus_lr_ratio=16, loraplus_weight_decay=DECAY, **kwargs)
    rates = {name: (use_muon, lr) for name, (use_muon, lr, _) in facts(optimizer).items()}
    assert len(rates) == 8
    assert all(rate == (True, 16 * LR if "lora_B" in name else LR) for name, rate in rates.items())


class Scored(nn.Module):
    """A loss that holds its model, and weights of its own."""

    def __init__(self, network):
        super().__init__()
        self.model = network
        torch.manual_seed(3)
        self.mix = nn.Sequential(nn.Linear(32, 24, bias=False), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, input_ids, labels, num_items_in_batch=None):
        output = self.model(input_ids, labels=labels, num_items_in_batch=num_items_in_batch, output_hidden_states=True)
        return SimpleNamespace(loss=output.loss + self.mix(output.hidden_states[-1]).square().mean())


class LossWithWeights(InOrder):
    """As sentence-transformers does: groups of the loss, which holds the model, under `optimizer_dict`."""

    mapping = {"layers.1.": SLOW, "mix.0": 0.5 * LR}

    def __init__(self, network, *args, key="optimizer_dict", **kwargs):
        super().__init__(network, *args, **kwargs)
        self.loss = Scored(network)
        self.key = key
        self.add_callback(OfTheLoss(self.loss.mix))

    def get_optimizer_cls_and_kwargs(self, args, model=None):
        cls, kwargs = super().get_optimizer_cls_and_kwargs(args, self.loss)
        assert not {"params", "model", "optimizer_dict"} & kwargs.keys()
        rest, _ = split(self.loss, *self.mapping)
        kwargs[self.key] = decay_groups(self.loss, DECAY, rest)
        for word, lr in self.mapping.items():
            kwargs[self.key] += decay_groups(self.loss, DECAY, split(self.loss, word)[1], lr=lr)
        return cls, kwargs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.loss(**inputs, num_items_in_batch=num_items_in_batch).loss


class OfTheLoss(TrainerCallback):
    """Clear all gradients, as sentence-transformers does, and save the loss's own weights: Trainer has the model's."""

    def __init__(self, mix):
        self.mix = mix

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.zero_grad()

    def on_save(self, args, state, control, **kwargs):
        torch.save(self.mix.state_dict(), f"{args.output_dir}/mix-{state.global_step}.pt")


@pytest.mark.promise("sentence-transformers")
@pytest.mark.parametrize("key", ["optimizer_dict", "params"])
def test_weights_of_a_loss_are_trained_and_resume_exactly(tmp_path, key):
    # Trainer clips the model's gradients alone.
    args = arguments(tmp_path, max_grad_norm=1e9, save_strategy="steps", save_steps=3)
    trainer = LossWithWeights(model(), args, train_dataset=dataset(), key=key)
    trainer.train()
    start, expected = Scored(model()), Scored(model())
    optimizer = by_routes(expected, **{word: {"lr": lr} for word, lr in trainer.mapping.items()})
    assert facts(optimizer)["mix.0.weight"] == (True, 0.5 * LR, DECAY)
    by_hand(expected, optimizer=optimizer, max_grad_norm=1e9)
    for part in (lambda network: network, lambda network: network.mix):
        networks = [list(part(network).parameters()) for network in (start, expected, trainer.loss)]
        assert relative_difference(*networks) < 1e-6
    resumed = LossWithWeights(model(), args, train_dataset=dataset(), key=key)
    resumed.loss.mix.load_state_dict(torch.load(tmp_path / "mix-3.pt"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_equal(trainer.loss, resumed.loss)
