"""What `get_optimizer_cls_and_kwargs` returns, called in each of the ways that programs around Trainer call it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_muon import Muon, build_optimizer
from tests.integrations.plain_script import LR, InOrder, dataset, model
from tests.integrations.trainer_runs import arguments, assert_same, by_hand, lora, train
from tests.reference import relative_difference

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


class CopiedCreateOptimizer(InOrder):
    """As scripts do that copy `create_optimizer` from before it had factories, and LLaMA-Factory's PPO."""

    def create_optimizer(self, model=None):
        groups = decay_groups(self.model, self.args.weight_decay)
        cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        for key in ("params", "model", "optimizer_dict"):
            if key in kwargs:
                groups = kwargs.pop(key)
        self.optimizer = cls(groups, **kwargs)
        assert cls.__name__ != "Adam8bit"
        return self.optimizer


class SeveralRates(InOrder):
    """As ms-swift does for `vit_lr` and `aligner_lr`: here the first layer is slower."""

    def create_optimizer(self, model=None):
        first = [(n, p) for n, p in self.model.named_parameters() if ".layers.0." in n]
        rest = [(n, p) for n, p in self.model.named_parameters() if ".layers.0." not in n]
        groups = [
            *decay_groups(self.model, self.args.weight_decay, first, lr=SLOW),
            *decay_groups(self.model, self.args.weight_decay, rest, lr=self.args.learning_rate),
        ]
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = cls(groups, **kwargs)
        return self.optimizer


class RateFromArguments(InOrder):
    """As axolotl does for `embedding_lr` and `lr_groups`: the groups take `kwargs["lr"]`."""

    def create_optimizer(self, model=None):
        cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = cls(groups_by_rate(self.model, kwargs["lr"], self.args.weight_decay), **kwargs)
        return self.optimizer


class RateAndDecayFromArguments(InOrder):
    """As Unsloth does for `embedding_learning_rate`: no model, and one decay for all."""

    def create_optimizer(self):
        cls, kwargs = InOrder.get_optimizer_cls_and_kwargs(self.args)
        lr, decay = kwargs["lr"], kwargs["weight_decay"]
        special = [p for n, p in self.model.named_parameters() if "embed_tokens" in n]
        rest = [p for n, p in self.model.named_parameters() if "embed_tokens" not in n]
        groups = [
            {"params": rest, "weight_decay": decay, "lr": lr},
            {"params": special, "weight_decay": decay, "lr": SLOW},
        ]
        self.optimizer = cls(groups, **kwargs)
        return self.optimizer


class RateTakenOut(InOrder):
    """As scripts do that pass a rate themselves."""

    def create_optimizer(self, model=None):
        cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        lr = kwargs.pop("lr", None)
        kwargs.pop("weight_decay", None)
        self.optimizer = cls(params=decay_groups(self.model, self.args.weight_decay), lr=lr, **kwargs)
        return self.optimizer


def groups_by_rate(network, lr, weight_decay):
    embeddings = [(n, p) for n, p in network.named_parameters() if "embed_tokens" in n or "lm_head" in n]
    rest = [(n, p) for n, p in network.named_parameters() if "embed_tokens" not in n and "lm_head" not in n]
    return [
        *decay_groups(network, weight_decay, rest, lr=lr),
        {"params": [p for _, p in embeddings], "weight_decay": 0.0, "lr": SLOW},
        {"params": [], "weight_decay": 0.0, "lr": lr},
    ]


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


def facts(optimizer):
    return {
        name: (group["use_muon"], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


no_decay = {"weight_decay": 0.0, "lr": SLOW}
SHAPES = {
    "ready groups after the model": (CopiedCreateOptimizer, {}),
    "several rates": (SeveralRates, {".layers.0.": {"lr": SLOW}}),
    "rate read": (RateFromArguments, {"embed_tokens": no_decay, "lm_head": no_decay}),
    "rate and decay read": (
        RateAndDecayFromArguments,
        {"embed_tokens": {"lr": SLOW}, "norm": {"weight_decay": DECAY}},
    ),
    "rate taken out": (RateTakenOut, {}),
}


@pytest.mark.promise("unsloth", "ms-swift", "axolotl")
@pytest.mark.parametrize(("trainer_class", "changes"), SHAPES.values(), ids=SHAPES)
def test_trains_as_groups_written_by_hand(tmp_path, trainer_class, changes):
    start, ours, theirs = model(), model(), model()
    trainer, losses = train(ours, tmp_path, trainer_class=trainer_class)
    optimizer = by_routes(theirs, **changes)
    names = facts(optimizer)
    _, expected = by_hand(theirs, optimizer=optimizer)
    assert_same(start, ours, theirs, losses, expected)
    initial = {name: group["initial_lr"] for group in trainer.optimizer.param_groups for name in group["param_names"]}
    assert initial == {name: lr for name, (_, lr, _) in names.items()}
    assert facts(trainer.optimizer) == {
        name: (use_muon, 0.0, decay) for name, (use_muon, _, decay) in names.items()
    }  # the schedule has ended


@pytest.mark.parametrize("trainer_class", [SeveralRates, RateFromArguments])
def test_resumes_exactly(tmp_path, trainer_class):
    whole, halved = model(), model()
    train(whole, tmp_path, trainer_class=trainer_class, save_strategy="steps", save_steps=3)
    train(halved, tmp_path / "on", trainer_class=trainer_class, resume=str(tmp_path / "checkpoint-3"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), halved.parameters(), strict=True))


def test_rate_of_muon_is_in_proportion(tmp_path):
    """Scale a group's rate by `muon_lr` and `adamw_lr`, exactly where it is `lr` itself."""
    options = {"learning_rate": 3e-4, "optim_args": "muon_lr=7e-4,adamw_lr=1.1e-4"}
    trainer = RateFromArguments(model(), arguments(tmp_path, **options), train_dataset=dataset())
    rates = {(use_muon, lr) for use_muon, lr, _ in facts(trainer.create_optimizer()).values()}
    assert rates == {(True, 7e-4), (False, 1.1e-4), (False, SLOW * 1.1e-4 / 3e-4)}


def test_lora_plus_of_peft(tmp_path):
    """Call peft's own LoRA+, as axolotl does."""
    from peft.optimizers import create_loraplus_optimizer

    network = lora()
    args = arguments(tmp_path, optim_args="lora=muon")
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, network)
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

    def __init__(self, network, *args, mapping=None, key="optimizer_dict", **kwargs):
        super().__init__(network, *args, **kwargs)
        self.loss = Scored(network)
        self.mapping = mapping or {}
        self.key = key
        self.add_callback(ClearGradients())

    def get_optimizer_cls_and_kwargs(self, args, model=None):
        cls, kwargs = super().get_optimizer_cls_and_kwargs(args, self.loss)
        assert not {"params", "model", "optimizer_dict"} & set(kwargs)
        groups = kwargs[self.key] = decay_groups(self.loss, self.args.weight_decay)
        for word, lr in self.mapping.items():
            mapped = {n: p for n, p in self.loss.named_parameters() if word in n}
            for group in groups:
                group["params"] = [p for p in group["params"] if all(p is not other for other in mapped.values())]
            groups += decay_groups(self.loss, self.args.weight_decay, mapped.items(), lr=lr)
        return cls, kwargs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.loss(**inputs, num_items_in_batch=num_items_in_batch).loss


@pytest.mark.promise("sentence-transformers")
@pytest.mark.parametrize("key", ["optimizer_dict", "params"])
def test_weights_of_a_loss_are_trained(tmp_path, key):
    mapping = {"layers.1.": SLOW, "mix.0": 0.5 * LR}
    args = arguments(tmp_path, max_grad_norm=1e9)  # Trainer clips the model's gradients alone
    trainer = LossWithWeights(model(), args, train_dataset=dataset(), mapping=mapping, key=key)
    trainer.train()
    start, expected = Scored(model()), Scored(model())
    optimizer = by_routes(expected, **{word: {"lr": lr} for word, lr in mapping.items()})
    assert facts(optimizer)["mix.0.weight"] == (False, 0.5 * LR, DECAY)
    by_hand(expected, optimizer=optimizer, max_grad_norm=1e9)
    networks = [list(network.parameters()) for network in (start, expected, trainer.loss)]
    assert relative_difference(*networks) < 1e-6
    networks = [list(network.mix.parameters()) for network in (start, expected, trainer.loss)]
    assert relative_difference(*networks) < 1e-6


def test_loss_with_weights_resumes_exactly(tmp_path):
    weights = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        args = arguments(tmp_path, save_strategy="steps", save_steps=3)
        trainer = LossWithWeights(model(), args, train_dataset=dataset(), mapping={"mix.0": SLOW})
        if resume:  # Trainer saves the model alone
            trainer.loss.mix.load_state_dict(torch.load(tmp_path / "mix.pt"))
        else:
            trainer.add_callback(SaveMix(trainer.loss.mix, tmp_path / "mix.pt"))
        trainer.train(resume_from_checkpoint=resume)
        weights.append(list(trainer.loss.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


class ClearGradients(TrainerCallback):
    """As sentence-transformers does: Trainer clears the model's gradients alone."""

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.zero_grad()


class SaveMix(TrainerCallback):
    def __init__(self, mix, path):
        self.mix, self.path = mix, path

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 3:
            torch.save(self.mix.state_dict(), self.path)


def test_a_group_without_muon_goes_to_adamw(tmp_path):
    network = model()
    first = list(network.model.layers[0].parameters())
    rest = [p for p in network.parameters() if all(p is not other for other in first)]
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path), network)
    optimizer = cls([{"params": first, "use_muon": False, "weight_decay": 0.0}, {"params": rest}], **kwargs)
    expected = facts(build_optimizer(network, lr=LR, weight_decay=DECAY))
    assert facts(optimizer) == {
        name: (False, LR, 0.0) if ".layers.0." in name else fact for name, fact in expected.items()
    }
