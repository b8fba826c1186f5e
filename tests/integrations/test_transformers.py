"""`optim: muon` through Trainer, against the same training written by hand."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)

from hf_muon import Muon, build_optimizer
from hf_muon.diagnostics import log as diagnostics
from hf_muon.integrations.transformers import layout as trainer_layout
from hf_muon.integrations.transformers.layout import replicate_group
from hf_muon.integrations.transformers.refusals import OLDEST
from hf_muon.ready_groups import MuonOfGroups
from tests.bounds import beyond_rounding, move
from tests.integrations.plain_script import BATCH, LR, OPTIONS, STEPS, InOrder, dataset, model, sentences
from tests.reference import moved, relative_difference


class Losses(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))


def arguments(path, **options):
    return TrainingArguments(str(path), **{**OPTIONS, **options})


def train(network, path, resume=None, data=None, **options):
    callback = Losses()
    trainer = InOrder(network, arguments(path, **options), train_dataset=data or dataset(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback.losses


def by_hand(network, *, accumulation=1, max_grad_norm=1.0, autocast=False, steps=STEPS, **options):
    """Train as the Trainer does, without the Trainer."""
    optimizer = build_optimizer(network, lr=LR, weight_decay=0.1, **options)
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


def assert_close(weights):
    """Assert that weights equal the loop's up to rounding; gradients may be computed in another order."""
    results = []
    for seed in (None, 0, 1):
        network = model()
        move(network, seed)
        by_hand(network, ns_dtype="fp32")
        results.append({name: param.detach() for name, param in network.named_parameters()})
    expected, *controls = results
    assert not beyond_rounding({name: weights[name] for name in expected}, expected, controls)


@pytest.mark.parametrize(
    ("trainer_options", "loop_options"),
    [
        ({}, {}),
        ({"max_grad_norm": 0.05}, {"max_grad_norm": 0.05}),
        ({"gradient_accumulation_steps": 3}, {"accumulation": 3}),
        ({"gradient_checkpointing": True}, {}),
        ({"bf16": True}, {"autocast": True}),
        (
            {"optim_args": "momentum=0.9,ns_steps=6,adamw_lr=1e-3,adamw_patterns=down_proj,adjust_lr_fn=original"},
            {
                "momentum": 0.9,
                "ns_steps": 6,
                "adamw_lr": 1e-3,
                "adamw_patterns": "down_proj",
                "adjust_lr_fn": "original",
            },
        ),
        ({"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-4}, {"adamw_betas": (0.8, 0.9), "adamw_eps": 1e-4}),
        ({"optim_target_modules": ["mlp"]}, {"optim_target_modules": ["mlp"]}),
    ],
    ids=["plain", "clipping", "accumulation", "checkpointing", "bf16", "optim_args", "adam fields", "target modules"],
)
def test_trainer_equals_a_loop_by_hand(tmp_path, trainer_options, loop_options):
    start, ours, theirs = model(), model(), model()
    trainer, losses = train(ours, tmp_path, **trainer_options)
    assert type(trainer.optimizer.optimizer) is Muon
    optimizer, expected = by_hand(theirs, **loop_options)
    assert_same(start, ours, theirs, losses, expected)
    for a, b in zip(trainer.optimizer.param_groups, optimizer.param_groups, strict=True):
        assert a["param_names"] == b["param_names"]
        assert a["use_muon"] == b["use_muon"]
        assert a["weight_decay"] == b["weight_decay"]


@pytest.mark.parametrize(
    ("package", "version"),
    [("transformers", "4.57.6"), ("transformers", "5.1.0.dev0"), ("transformers", "5.5.3"), ("accelerate", "1.10.1")],
)
def test_packages_that_are_too_old_are_named_at_once(tmp_path, monkeypatch, package, version):
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else installed(name))
    words = f"optim: muon needs {package} {OLDEST[package]} or newer, and {version} is installed. Run: pip"
    with pytest.raises(RuntimeError, match=words):
        arguments(tmp_path)
    line = ["--output_dir", str(tmp_path), "--optim", "muon", "--use_cpu", "true"]
    with pytest.raises(RuntimeError, match=words):
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    assert arguments(tmp_path, optim="adamw_torch")


def test_optim_args_as_a_mapping(tmp_path):
    """Accept the mapping that a YAML file may hold, which transformers itself cannot split."""
    args = arguments(tmp_path, optim_args={"momentum": 0.8, "nesterov": False, "adamw_betas": [0.5, 0.6]})
    config = Trainer.get_optimizer_cls_and_kwargs(args)[1]["config"]
    assert (config.momentum, config.nesterov, config.adamw_betas) == (0.8, False, (0.5, 0.6))
    with pytest.raises(ValueError, match=r"'momentun' is not an option of muon"):
        arguments(tmp_path, optim_args={"momentun": 0.8})


def test_bf16_weights(tmp_path):
    """Train bf16 weights, without autocast and fp32 copies."""
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    train(ours, tmp_path)
    by_hand(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_clipping_is_of_the_gradient_not_of_the_direction(tmp_path):
    """Orthogonalization ignores the scale of its input, so that clipping one step's gradients changes no direction."""
    start, clipped, free = model(), model(), model()
    options = {"max_steps": 1, "warmup_steps": 0}
    trainer, _ = train(clipped, tmp_path, max_grad_norm=1e-3, **options)
    train(free, tmp_path, max_grad_norm=1e6, **options)
    routed = set(trainer.optimizer.param_groups[0]["param_names"])
    matrices = [[p for n, p in network.named_parameters() if n in routed] for network in (start, free, clipped)]
    assert relative_difference(*matrices) < 1e-4


@pytest.mark.slow
def test_torch_compile(tmp_path):
    ours = model()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "optim_args": "ns_dtype=fp32"}
    trainer, _ = train(ours, tmp_path, **options)
    assert_close(ours.state_dict())
    names = [name for group in trainer.optimizer.param_groups for name in group["param_names"]]
    assert not any("_orig_mod" in name for name in names)


def lora(**options):
    import peft

    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian", **options)
    return peft.get_peft_model(model(), config)


def test_lora(tmp_path):
    start, ours, theirs = lora(), lora(), lora()
    trainer, losses = train(ours, tmp_path, optim_args="lora=muon")
    _, expected = by_hand(theirs, lora="muon")
    assert_same(start, ours, theirs, losses, expected)
    muon = trainer.optimizer.param_groups[0]
    assert muon["use_muon"]
    assert len(muon["params"]) == 8
    assert all("lora_" in name for name in muon["param_names"])


def test_lora_without_opting_in_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="Only LoRA factors are trained: set lora=muon"):
        train(lora(), tmp_path)


def test_frozen_layers(tmp_path):
    ours, theirs = model(), model()
    for network in (ours, theirs):
        network.model.layers[0].requires_grad_(False)
    start = copy.deepcopy(ours)
    _, losses = train(ours, tmp_path)
    _, expected = by_hand(theirs)
    assert_same(start, ours, theirs, losses, expected)
    assert moved(list(start.model.layers[0].parameters()), list(ours.model.layers[0].parameters())) == 0


class TestResume:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_bit_exact(self, tmp_path, dtype):
        straight, first, second = model(dtype), model(dtype), model(dtype)
        options = {"save_strategy": "steps", "save_steps": 3}
        _, losses = train(straight, tmp_path / "straight")
        train(first, tmp_path / "run", **options)
        trainer, resumed = train(second, tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-3"), **options)
        assert resumed[-3:] == losses[3:]
        for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b), name
        for group in trainer.optimizer.param_groups:
            if group["use_muon"]:
                assert all(
                    trainer.optimizer.state[p]["momentum_buffer"].dtype == torch.float32 for p in group["params"]
                )

    def test_lora_is_bit_exact(self, tmp_path):
        straight, first, second = lora(), lora(), lora()
        options = {"save_strategy": "steps", "save_steps": 3, "optim_args": "lora=muon"}
        train(straight, tmp_path / "straight", optim_args="lora=muon")
        train(first, tmp_path / "run", **options)
        train(second, tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-3"), **options)
        for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b), name

    def test_shows_when_the_momentum_is_lost(self, tmp_path):
        """Show that the comparison above fails without the moments."""
        straight, first, second = model(), model(), model()
        train(straight, tmp_path / "straight")
        train(first, tmp_path / "run", save_strategy="steps", save_steps=3)
        checkpoint = tmp_path / "run" / "checkpoint-3"
        saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        for state in saved["state"].values():
            for value in state.values():
                value.zero_()
        torch.save(saved, checkpoint / "optimizer.pt")
        train(second, tmp_path / "run", resume=str(checkpoint))
        start = model()
        params = [list(network.parameters()) for network in (start, straight, second)]
        assert relative_difference(*params) > 1e-2

    def test_checkpoint_of_another_optimizer(self, tmp_path):
        train(model(), tmp_path, optim="adamw_torch", save_strategy="steps", save_steps=3)
        with pytest.raises(ValueError, match="written by another optimizer"):
            train(model(), tmp_path, resume=str(tmp_path / "checkpoint-3"))

    def test_checkpoint_of_another_routing(self, tmp_path):
        train(model(), tmp_path, save_strategy="steps", save_steps=3)
        with pytest.raises(
            ValueError, match=r"the routing changed for model.layers.0.mlp.down_proj.weight \(Muon there"
        ):
            train(model(), tmp_path, resume=str(tmp_path / "checkpoint-3"), optim_args="adamw_patterns=down_proj")

    def test_truncated_checkpoint(self, tmp_path):
        train(model(), tmp_path, save_strategy="steps", save_steps=3)
        file = tmp_path / "checkpoint-3" / "optimizer.pt"
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(RuntimeError):
            train(model(), tmp_path, resume=str(tmp_path / "checkpoint-3"))


class TestOptions:
    @pytest.mark.parametrize(
        ("optim_args", "message"),
        [
            ("moment=0.9", r"'moment' is not an option of muon. Did you mean 'momentum'\? Valid: lr, weight_decay"),
            ("momentum", "not of the form name=value"),
            ("ns_steps=many", "ns_steps=many cannot be read. Valid: an integer from 1 to 99"),
            ("momentum=1", "momentum=1.0 is not valid. Valid: a number from 0 to below 1"),
        ],
    )
    def test_mistakes_are_found_with_the_arguments_before_any_model(self, tmp_path, optim_args, message):
        with pytest.raises(ValueError, match=message):
            arguments(tmp_path, optim_args=optim_args)

    def test_pattern_that_matches_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="adamw_patterns: 'router' matches no parameter"):
            train(model(), tmp_path, optim_args="adamw_patterns=router")

    def test_model_without_matrices(self, tmp_path):
        class Bag(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(48, 8)

            def forward(self, input_ids, labels):
                return {"loss": self.table(input_ids).square().mean()}

        with pytest.raises(ValueError, match="No parameter of Bag reaches Muon: 1 x embedding"):
            train(Bag(), tmp_path)

    def test_optim_args_win_over_the_general_fields(self, tmp_path):
        trainer, _ = train(model(), tmp_path, optim_args="weight_decay=0.3,adamw_betas=0.5|0.6", max_steps=1)
        assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.3
        assert trainer.optimizer.param_groups[0]["adamw_betas"] == (0.5, 0.6)

    def test_schedulers_move_both_halves(self, tmp_path):
        options = {"optim_args": "muon_lr=0.04,adamw_lr=0.001", "lr_scheduler_type": "linear", "warmup_steps": 0}
        trainer, _ = train(model(), tmp_path, max_steps=4, **options)
        rates = [group["lr"] / group["initial_lr"] for group in trainer.optimizer.param_groups]
        assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [0.04, 0.001, 0.001]
        assert rates == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("name", ["cosine_with_min_lr", "reduce_lr_on_plateau", "constant_with_warmup"])
    def test_other_schedulers(self, tmp_path, name):
        kwargs = {"cosine_with_min_lr": {"min_lr": 1e-4}}.get(name, {})
        options = {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, "max_steps": 2}
        if name == "reduce_lr_on_plateau":
            options |= {"warmup_steps": 0, "eval_strategy": "steps", "eval_steps": 1}
            trainer = InOrder(model(), arguments(tmp_path, **options), train_dataset=dataset(), eval_dataset=dataset(8))
            trainer.train()
        else:
            train(model(), tmp_path, **options)

    def test_from_a_yaml_file(self, tmp_path):
        (tmp_path / "x.yaml").write_text(
            f"output_dir: {tmp_path}\noptim: muon\noptim_args: momentum=0.9\nlearning_rate: 0.01\nuse_cpu: true\n"
        )
        (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(tmp_path / "x.yaml"))
        assert args.optim == "muon"
        assert args.to_dict()["optim"] == "muon"

    def test_rates_that_yaml_reads_as_text(self, tmp_path):
        network = model()
        args = arguments(tmp_path, learning_rate="1e-2")
        assert Trainer(network, args).create_optimizer().param_groups[0]["lr"] == 0.01

    def test_set_optimizer(self, tmp_path):
        args = TrainingArguments(str(tmp_path), use_cpu=True).set_optimizer("muon", args="momentum=0.9")
        assert Trainer(model(), args).create_optimizer().param_groups[0]["momentum"] == 0.9


class TestMetrics:
    def test_the_log_and_a_file_have_them_and_weights_do_not_differ(self, tmp_path):
        without, with_metrics = model(), model()
        _, losses = train(without, tmp_path / "off")
        assert not (tmp_path / "off" / "muon_diagnostics.jsonl").exists()
        trainer, measured_losses = train(
            with_metrics,
            tmp_path / "on",
            optim_args=f"{OPTIONS.get('optim_args') or ''},diagnostics_every=2".strip(","),
        )
        assert measured_losses == losses
        assert all(torch.equal(a, b) for a, b in zip(without.parameters(), with_metrics.parameters(), strict=True))
        lines = [json.loads(line) for line in (tmp_path / "on" / "muon_diagnostics.jsonl").read_text().splitlines()]
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        logged = [entry for entry in lines if entry["event"] == "log" and "loss" in entry]
        assert [(entry["step"], entry["loss"]) for entry in logged] == [
            (entry["step"], pytest.approx(entry["loss"], rel=1e-5)) for entry in history
        ]
        steps = {line["step"]: line for line in lines if line["event"] == "step"}
        assert list(steps) == list(range(2, STEPS + 1, 2))
        for entry in history:
            assert ("muon/update_rms" in entry) == (entry["step"] in steps)
            if entry["step"] in steps:
                line = steps[entry["step"]]
                assert entry["muon/lr"] == line["muon_lr"]
                values = [value for value in line["update_rms"] if value is not None]
                assert entry["muon/update_rms"] == pytest.approx(sum(values) / len(values), rel=1e-4)
        assert any(key.startswith("muon/update_rms/mlp.") for key in history[-1] | history[-2])


class TestNonFinite:
    def test_step_is_refused_by_name(self, tmp_path):
        network = model()

        def poison(grad):
            return torch.full_like(grad, float("nan"))

        network.model.layers[1].mlp.up_proj.weight.register_hook(poison)
        before = copy.deepcopy(network)
        # Trainer clips by the total norm, which makes every gradient NaN.
        with pytest.raises(RuntimeError, match=r"refuses this step.*\n.*every parameter .* 25 in all"):
            train(network, tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before.parameters(), strict=True))


class TestReadyMadeGroups:
    """`cls(param_groups, **kwargs)`, the way LLaMA-Factory's PPO and LoRA+ call what transformers gives them."""

    def build(self, tmp_path, groups, **options):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, **options))
        assert issubclass(cls, torch.optim.Optimizer)
        return cls(groups, **kwargs)

    def test_decay_and_no_decay_groups(self, tmp_path):
        network = model()
        decaying = Trainer.get_decay_parameter_names(None, network)
        groups = [
            {"params": [p for n, p in network.named_parameters() if n not in decaying], "weight_decay": 0.0},
            {"params": [p for n, p in network.named_parameters() if n in decaying], "weight_decay": 0.1},
        ]
        optimizer = self.build(tmp_path, groups)
        assert isinstance(optimizer, MuonOfGroups)
        expected = build_optimizer(network, lr=LR, weight_decay=0.1)
        groups = {
            name: (g["use_muon"], g["lr"], g["weight_decay"])
            for g in optimizer.param_groups
            for name in g["param_names"]
        }
        assert groups == {
            name: (g["use_muon"], g["lr"], g["weight_decay"])
            for g in expected.param_groups
            for name in g["param_names"]
        }

    def test_groups_without_decay_follow_the_rule(self, tmp_path):
        network = model()
        optimizer = self.build(tmp_path, list(network.parameters()))
        decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
        assert decays["model.norm.weight"] == 0.0
        assert decays["model.embed_tokens.weight"] == decays["model.layers.0.mlp.up_proj.weight"] == 0.1

    def test_own_rates_are_kept_in_proportion(self, tmp_path):
        network = lora()
        parts = {x: [p for n, p in network.named_parameters() if f"lora_{x}" in n] for x in "AB"}
        groups = [{"params": parts["A"], "lr": LR}, {"params": parts["B"], "lr": 16 * LR}, {"params": []}]
        optimizer = self.build(tmp_path, groups, optim_args=f"lora=muon,muon_lr={LR / 2}")
        assert [(g["use_muon"], g["lr"]) for g in optimizer.param_groups] == [(True, LR / 2), (True, 8 * LR)]

    def test_steps_as_the_built_one(self, tmp_path):
        one, other = model(), model()
        optimizers = [self.build(tmp_path, list(one.parameters())), build_optimizer(other, lr=LR, weight_decay=0.1)]
        batch = sentences()[:4]
        for network, optimizer in zip((one, other), optimizers, strict=True):
            for _ in range(3):
                network(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    def test_flat_list_gives_the_groups_of_build_optimizer(self, tmp_path):
        network = model()
        groups = self.build(tmp_path, network.parameters()).param_groups
        expected = build_optimizer(network, lr=LR, weight_decay=0.1).param_groups
        assert [g["param_names"] for g in groups] == [g["param_names"] for g in expected]

    def test_decay_of_the_halves(self, tmp_path):
        network = model()
        groups = [{"params": list(network.parameters()), "weight_decay": 0.2}]
        rows = self.build(tmp_path, groups, optim_args="adamw_weight_decay=0.4").param_groups
        assert [(g["use_muon"], g["weight_decay"]) for g in rows] == [(True, 0.2), (False, 0.4)]
        groups = [{"params": list(network.parameters()), "weight_decay": 0.0}]
        rows = self.build(tmp_path, groups, optim_args="adamw_weight_decay=0.4").param_groups
        assert [g["weight_decay"] for g in rows] == [0.0, 0.0]

    def test_other_keys_of_a_group_are_kept_or_refused(self, tmp_path):
        network = model()
        weight = network.model.layers[0].mlp.up_proj.weight
        assert self.build(tmp_path, [{"params": weight, "momentum": 0.5}]).param_groups[0]["momentum"] == 0.5
        with pytest.raises(ValueError, match=r"'betas' is not an option of muon. Did you mean 'adamw_betas'\?"):
            self.build(tmp_path, [{"params": weight, "betas": (0.9, 0.9)}])

    def test_parameters_of_no_model(self, tmp_path):
        with pytest.raises(RuntimeError, match=r"shapes \[\(4, 4\)\].*no live model holds them. Use hf_muon.build"):
            self.build(tmp_path, [nn.Parameter(torch.randn(4, 4))])

    def test_through_the_trainer(self, tmp_path):
        """Hand the Trainer's own groups to the class, by `optimizer_cls_and_kwargs`."""
        start, ours, theirs = model(), model(), model()
        args = arguments(tmp_path)
        pair = Trainer.get_optimizer_cls_and_kwargs(args)
        InOrder(ours, args, train_dataset=dataset(), optimizer_cls_and_kwargs=pair).train()
        by_hand(theirs)
        assert relative_difference(list(start.parameters()), list(theirs.parameters()), list(ours.parameters())) < 1e-6


class TestRefusedLayouts:
    """Before an optimizer is made; `tests/e2e/test_trainer_layouts.py` runs the layouts that are not refused."""

    def refused(self, args, network=None):
        with pytest.raises(RuntimeError) as refusal:
            Trainer.get_optimizer_cls_and_kwargs(args, network)
        return str(refusal.value)

    @pytest.mark.parametrize("version", [None, "1"])
    def test_fsdp1_of_accelerate_launch(self, tmp_path, monkeypatch, version):
        args = arguments(tmp_path)
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        if version:  # else accelerate's own default, which is 1
            monkeypatch.setenv("FSDP_VERSION", version)
        message = self.refused(args, model())
        assert message.startswith("optim: muon does not run under FSDP version 1, which keeps flat slices")
        assert 'fsdp_config={"version": 2} in TrainingArguments' in message
        assert "accelerate launch --fsdp_version 2" in message

    def test_fsdp1_of_the_arguments(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # is set as a side effect otherwise
        args = arguments(tmp_path, fsdp="full_shard auto_wrap", fsdp_config={"version": 1})
        assert "FSDP version 1" in self.refused(args, model())

    def test_tensor_parallel_in_plain_tensors(self, tmp_path):
        network = model()
        network._tp_size = 2
        assert "cuts matrices for 2 ranks into plain tensors" in self.refused(arguments(tmp_path), network)

    @pytest.mark.parametrize("source", ["arguments", "environment"])
    def test_fsdp2_that_became_something_else_is_told(self, tmp_path, monkeypatch, caplog, source):
        """Warn where accelerate, which runs FSDP on accelerators only, silently trains something else on a CPU."""
        trainer = Trainer(model(), arguments(tmp_path))
        if source == "environment":
            monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
            monkeypatch.setenv("FSDP_VERSION", "2")
        else:
            trainer.args.fsdp, trainer.args.fsdp_plugin_args = "full_shard auto_wrap", {"fsdp_version": 2}
        monkeypatch.setattr(diagnostics.logger(), "propagate", True)
        with caplog.at_level("WARNING", "hf_muon"):
            trainer.create_optimizer()
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warning.startswith("FSDP was asked for, and accelerate runs one process: nothing is sharded")

    def test_deepspeed(self, tmp_path, monkeypatch):
        args = arguments(tmp_path)
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        assert Trainer.get_optimizer_cls_and_kwargs(args, model())
        args.deepspeed_plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"zero_hpz_partition_size": 2}})
        with pytest.raises(RuntimeError, match="does not run with this DeepSpeed config"):
            Trainer.get_optimizer_cls_and_kwargs(args, model())

    def test_megatron(self, tmp_path, monkeypatch):
        args = arguments(tmp_path)
        monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
        assert "does not run under Megatron-LM" in self.refused(args, model())

    @pytest.mark.parametrize("axis", ["cp", "sp"])
    def test_parallel_sequences(self, tmp_path, axis):
        args = arguments(tmp_path)
        args.parallelism_config = SimpleNamespace(**{f"{axis}_size": 2})
        assert f"does not run under ParallelismConfig({axis}_size) in this version" in self.refused(args, model())

    @pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
    def test_other_axes_are_not_refused(self, tmp_path, axis):
        args = arguments(tmp_path)
        args.parallelism_config = SimpleNamespace(**{f"{axis}_size": 2, "cp_size": 1, "sp_size": None})
        assert Trainer.get_optimizer_cls_and_kwargs(args, model())


class TestReplicas:
    """Who is said to hold copies of every parameter, by what accelerate has decided."""

    @pytest.fixture
    def world(self, monkeypatch):
        """Stand in for accelerate's state under DDP, with a process group of all ranks."""
        state = SimpleNamespace(distributed_type=SimpleNamespace(value="MULTI_GPU"), parallelism_config=None)
        monkeypatch.setattr(trainer_layout, "accelerator_state", lambda: state)
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        yield state
        torch.distributed.destroy_process_group()

    def test_ddp(self, world):
        assert replicate_group(model()) is torch.distributed.group.WORLD
        assert replicate_group(None) is torch.distributed.group.WORLD

    def test_reaches_the_optimizer(self, world, tmp_path):
        args = arguments(tmp_path)
        network = model()
        factory, options = Trainer.get_optimizer_cls_and_kwargs(args, network)
        assert factory()(network, **options).replicate_group is torch.distributed.group.WORLD
        cls, options = Trainer.get_optimizer_cls_and_kwargs(args)
        assert cls(network.parameters(), **options).replicate_group is torch.distributed.group.WORLD

    @pytest.mark.parametrize("kind", ["NO", "FSDP", "XLA", "DEEPSPEED"])
    def test_process_group_alone_says_nothing(self, world, kind):
        world.distributed_type.value = kind
        assert replicate_group(model()) is None

    @pytest.mark.parametrize("axis", ["tp", "cp", "sp"])
    def test_axes_that_accelerate_does_not_wrap(self, world, axis):
        world.parallelism_config = SimpleNamespace(**{f"{axis}_size": 2, "dp_replicate_size": 2})
        assert replicate_group(model()) is None

    @pytest.mark.parametrize(
        ("attribute", "value"),
        [
            ("_is_distributed_loading_by_transformers", True),
            ("_ddp_params_and_buffers_to_ignore", ["lm_head.weight"]),
            ("hf_device_map", {"model": 0, "lm_head": 1}),
        ],
    )
    def test_models_that_are_not_copies(self, world, attribute, value):
        network = model()
        if attribute.startswith("_is_") and not hasattr(type(network), attribute.removeprefix("_")):
            pytest.skip("this transformers does not cut models as it loads them")
        setattr(network, attribute, value)
        assert replicate_group(network) is None

    def test_no_accelerator(self, monkeypatch):
        monkeypatch.setattr(trainer_layout, "accelerator_state", lambda: None)
        assert replicate_group(model()) is None


SCRIPT = Path(__file__).with_name("plain_script.py")


def run_script(path, *arguments, launcher=(), **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *launcher, str(SCRIPT), arguments[0], str(path), *arguments[1:]]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert process.returncode == 0, process.stderr
    return torch.load(path, weights_only=True)


@pytest.mark.slow
class TestProcesses:
    @pytest.fixture
    def expected(self):
        network = model()
        by_hand(network, ns_dtype="fp32")
        return network

    def test_script_without_our_import(self, tmp_path, expected):
        """Compare a script that does not import hf_muon with the loop."""
        weights = run_script(tmp_path / "weights.pt", "muon")
        ours = [weights[name] for name, _ in expected.named_parameters()]
        assert relative_difference(list(model().parameters()), list(expected.parameters()), ours) < 1e-6

    def test_two_processes(self, tmp_path):
        """DDP with the same global batch, against the loop; gradients are summed in another order."""
        launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone")
        weights = run_script(tmp_path / "weights.pt", "muon", str(BATCH // 2), launcher=launcher)
        assert_close(weights)

    @pytest.mark.extended
    def test_adamw_runs_are_untouched(self, tmp_path):
        on = run_script(tmp_path / "on.pt", "adamw_torch")
        off = run_script(tmp_path / "off.pt", "adamw_torch", HF_MUON_AUTOLOAD="0")
        assert on.keys() == off.keys()
        assert all(torch.equal(on[name], off[name]) for name in on)
