"""`optim: muon` through Trainer, compared with the same training written by hand."""

from __future__ import annotations

import functools
import json
import statistics
from types import SimpleNamespace

import pytest
import torch
import transformers.trainer
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from hf_muon import Muon
from hf_muon.integrations.transformers.run_refusals import refuse_plain_shards
from tests.integrations.plain_script import STEPS, InOrder, dataset, model
from tests.integrations.trainer_runs import arguments, assert_same, by_hand, lora, train
from tests.rules.attention_models import make
from tests.support.reference import moved

pytestmark = pytest.mark.every_stack


def frozen():
    network = model()
    network.model.layers[0].requires_grad_(False)
    return network


OF_TEXT = "momentum=0.9,ns_steps=6,adamw_lr=1e-3,adamw_patterns=down_proj,adjust_lr_fn=original"
OF_LOOP = {
    "momentum": 0.9,
    "ns_steps": 6,
    "adamw_lr": 1e-3,
    "adamw_patterns": "down_proj",
    "adjust_lr_fn": "original",
    "adamw_betas": (0.8, 0.9),
    "adamw_eps": 1e-4,
}
# A model, what Trainer gets, and what the loop gets.
RUNS = {
    "plain": (model, {}, {}),
    "clipping, accumulation": (
        model,
        {"max_grad_norm": 0.05, "gradient_accumulation_steps": 3},
        {"max_grad_norm": 0.05, "accumulation": 3},
    ),
    "bf16, checkpointing": (model, {"bf16": True, "gradient_checkpointing": True}, {"autocast": True}),
    "optim_args, adam fields": (
        model,
        {"optim_args": OF_TEXT, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
        OF_LOOP,
    ),
    "lora": (lora, {"optim_args": "lora=muon"}, {"lora": "muon"}),
    "frozen": (frozen, {}, {}),
}


@pytest.mark.promise("one-process", "transformers", "lora")
@pytest.mark.parametrize("name", RUNS)
def test_trainer_equals_a_loop_by_hand(tmp_path, name):
    make_model, trainer_options, loop_options = RUNS[name]
    start, ours, theirs = make_model(), make_model(), make_model()
    trainer, losses = train(ours, tmp_path, **trainer_options)
    assert type(trainer.optimizer.optimizer) is Muon
    optimizer, expected = by_hand(theirs, **loop_options)
    assert_same(start, ours, theirs, losses, expected)
    groups = trainer.optimizer.param_groups
    for a, b in zip(groups, optimizer.param_groups, strict=True):
        assert all(a[key] == b[key] for key in ("param_names", "use_muon", "weight_decay"))
    names = groups[0]["param_names"]
    assert len(names) == {"lora": 8, "frozen": 7, "optim_args, adam fields": 12}.get(name, 14)
    assert all("lora_" in own for own in names) is (name == "lora")
    if name == "frozen":
        assert moved(list(start.model.layers[0].parameters()), list(ours.model.layers[0].parameters())) == 0


@pytest.mark.parametrize("options", [{}, {"weight_rounding": "nearest", "adamw_state_dtype": "int8"}], ids=str)
def test_bf16_weights(tmp_path, options):
    """Train bf16 weights without autocast or fp32 copies."""
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    train(ours, tmp_path, optim_args=",".join(f"{name}={value}" for name, value in options.items()))
    by_hand(theirs, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_the_log_and_a_file_have_the_metrics_and_weights_do_not_differ(tmp_path):
    without, with_metrics = model(), model()
    _, losses = train(without, tmp_path / "off")
    assert not (tmp_path / "off" / "muon_diagnostics.jsonl").exists()
    trainer, measured_losses = train(with_metrics, tmp_path / "on", optim_args="diagnostics_every=2")
    assert measured_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(without.parameters(), with_metrics.parameters(), strict=True))
    lines = [json.loads(line) for line in (tmp_path / "on" / "muon_diagnostics.jsonl").read_text().splitlines()]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    logged = [(line["step"], line["loss"]) for line in lines if line["event"] == "log" and "loss" in line]
    assert logged == [(entry["step"], pytest.approx(entry["loss"], rel=1e-5)) for entry in history]
    steps = {line["step"]: line for line in lines if line["event"] == "step"}
    assert list(steps) == list(range(2, STEPS + 1, 2))
    for entry in history:
        shown = {key: value for key, value in entry.items() if key.startswith("muon/")}
        assert bool(shown) is (entry["step"] in steps)
        assert len(shown) <= 3  # the console prints them all
        for key, center in (("orthogonality_error", statistics.mean), ("relative_update", statistics.median)):
            if shown:
                values = [value for value in steps[entry["step"]][key] if value is not None]
                assert shown[f"muon/{key}"] == pytest.approx(center(values), rel=1e-4)


def test_reporters_get_the_metrics(tmp_path, monkeypatch):
    """As TensorBoard and W&B do, which Trainer calls with the logs."""
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Reporter)
    train(model(), tmp_path, optim_args="diagnostics_every=1", report_to="tensorboard", logging_steps=1)
    of_training = [logs for logs in seen if "loss" in logs]
    assert len(of_training) == STEPS
    assert all({"muon/relative_update", "muon/orthogonality_error"} <= logs.keys() for logs in of_training[1:])


CLIP = 0.1  # some heads are beyond it


def test_trainer_clips_heads_as_a_loop_does_and_logs_it(tmp_path):
    ours, theirs, without = (make("llama") for _ in range(3))
    text = f"ns_dtype=fp32,qk_clip={CLIP},diagnostics_every=1"
    trainer, losses = train(ours, tmp_path, optim_args=text, logging_steps=1)
    optimizer, expected = by_hand(theirs, ns_dtype="fp32", qk_clip=CLIP)
    assert_same(make("llama"), ours, theirs, losses, expected)
    logged = [entry for entry in trainer.state.log_history if "muon/max_logit" in entry]
    assert len(logged) == STEPS
    assert sum(entry["muon/clipped_heads"] for entry in logged) > 0
    by_hand(without, ns_dtype="fp32")
    assert not all(torch.equal(a, b) for a, b in zip(without.parameters(), ours.parameters(), strict=True))
    assert optimizer.param_groups[0]["qk_clip"] == CLIP


# --- options, of `optim_args` and of TrainingArguments


def test_a_floor_of_the_schedule_is_that_of_muon_if_both_rates_are_set(tmp_path):
    options = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-4},
        "learning_rate": 5e-5,
    }
    trainer, _ = train(model(), tmp_path, optim_args="muon_lr=0.02,adamw_lr=0.001", **options)
    rates = {group["use_muon"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert rates == pytest.approx({True: 1e-4, False: 5e-6})


def test_optim_args_may_have_several_lines(tmp_path):
    trainer = InOrder(model(), arguments(tmp_path, optim_args="muon_lr=0.02,\n  adamw_lr=0.001\n"))
    assert {group["lr"] for group in trainer.create_optimizer().param_groups} == {0.02, 0.001}


def of_line(words):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    return args


def of_yaml(path):
    file = path / "x.yaml"
    file.write_text(f"output_dir: {path}\noptim: muon\noptim_args: momentum=0.8\nlearning_rate: 1e-2\nuse_cpu: true\n")
    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(file))
    assert args.to_dict()["optim"] == "muon"
    return args


@pytest.mark.parametrize(
    ("make_arguments", "expected"),
    [
        (lambda path: arguments(path, optim_args={"momentum": 0.8, "nesterov": False}), {"nesterov": False}),
        (  # they win over the general fields
            lambda path: arguments(path, optim_args="momentum=0.8,weight_decay=0.3,adamw_betas=0.5|0.6"),
            {"weight_decay": 0.3, "adamw_betas": (0.5, 0.6)},
        ),
        (lambda path: arguments(path, optim_args="momentum=0.8", learning_rate="1e-2"), {"lr": 0.01}),
        (of_yaml, {"lr": 0.01}),
        (lambda path: TrainingArguments(str(path), use_cpu=True).set_optimizer("muon", args="momentum=0.8"), {}),
        *(
            (lambda path, n=name: of_line(f"--output_dir {path} --optim {n} --optim_args momentum=0.8".split()), {})
            for name in ("muon", "hf_muon")
        ),
    ],
    ids=["mapping", "precedence", "rate as text", "YAML", "set_optimizer", "line", "line, second name"],
)
def test_options_reach_the_optimizer(tmp_path, make_arguments, expected):
    group = Trainer(model(), make_arguments(tmp_path)).create_optimizer().param_groups[0]
    expected = {"momentum": 0.8, **expected}
    assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize("name", ["linear", "reduce_lr_on_plateau"])
def test_schedulers_move_both_halves(tmp_path, name):
    options = {"optim_args": "muon_lr=0.04,adamw_lr=0.001", "lr_scheduler_type": name, "warmup_steps": 0}
    options |= {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = InOrder(model(), arguments(tmp_path, **options), train_dataset=dataset(), eval_dataset=dataset(8))
    trainer.train()
    groups = trainer.optimizer.param_groups
    factor = 0.0 if name == "linear" else 1.0
    assert [group["lr"] for group in groups] == [factor * rate for rate in (0.04, 0.001, 0.001)]
    assert name == "reduce_lr_on_plateau" or [group["initial_lr"] for group in groups] == [0.04, 0.001, 0.001]
    assert {group["step"] for group in groups} == {2}


def test_layers_that_become_trainable_while_training_are_named_once(tmp_path, caplog):
    class Unfreeze(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            model.model.layers[0].requires_grad_(state.global_step > 1)

    network = frozen()
    trainer = InOrder(network, arguments(tmp_path), train_dataset=dataset(), callbacks=[Unfreeze()])
    trainer.train()
    assert all(
        torch.equal(a, b)
        for a, b in zip(frozen().model.layers[0].parameters(), network.model.layers[0].parameters(), strict=True)
    )
    lines = [line for line in caplog.messages if "[unfrozen-later]" in line]
    assert len(lines) == 1
    assert "model.layers.0.input_layernorm.weight" in lines[0]
    caplog.clear()
    train(model(), tmp_path, max_steps=1)
    assert not [line for line in caplog.messages if "[unfrozen-later]" in line]


def test_arguments_of_other_trainers_have_no_optim():
    """Some take transformers' default callbacks and give them arguments of their own."""
    callbacks = [kind() for kind in transformers.trainer.DEFAULT_CALLBACKS]
    handler = CallbackHandler(callbacks, None, None, None, None)
    args = SimpleNamespace(logging_strategy="steps")
    for event in (handler.on_train_begin, functools.partial(handler.on_log, logs={"loss": 1.0})):
        event(args, TrainerState(), TrainerControl())


def test_axes_that_are_not_refused(tmp_path):
    for axis in ("dp_replicate", "dp_shard", "tp"):
        args = arguments(tmp_path)
        args.parallelism_config = SimpleNamespace(**{f"{axis}_size": 2, "cp_size": 1, "sp_size": None})
        assert Trainer.get_optimizer_cls_and_kwargs(args, model())


@pytest.mark.parametrize("size", ["auto", torch.nn.Identity()])
def test_a_users_attribute_tp_size_is_no_number_of_ranks(size):
    network = torch.nn.Sequential(torch.nn.Linear(4, 4))
    network.tp_size = size
    refuse_plain_shards(network)
