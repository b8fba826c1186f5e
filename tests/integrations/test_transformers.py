"""`optim: muon` through Trainer, compared with the same training written by hand."""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_muon import Muon
from tests.integrations.plain_script import OPTIONS, STEPS, InOrder, dataset, model
from tests.integrations.trainer_runs import arguments, assert_close, assert_same, by_hand, lora, train
from tests.reference import moved, relative_difference
from tests.rules.attention_models import make


@pytest.mark.promise("one-process", "transformers")
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
    ],
    ids=["plain", "clipping", "accumulation", "checkpointing", "bf16", "optim_args", "adam fields"],
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


@pytest.mark.parametrize("options", [{}, {"weight_rounding": "nearest"}, {"adamw_state_dtype": "int8"}], ids=str)
def test_bf16_weights(tmp_path, options):
    """Train bf16 weights without autocast or fp32 copies."""
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    train(ours, tmp_path, optim_args=",".join(f"{name}={value}" for name, value in options.items()))
    by_hand(theirs, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_clipping_is_of_the_gradient_not_of_the_direction(tmp_path):
    """Clip one step's gradients: orthogonalization ignores the scale of its input, so that no direction changes."""
    start, clipped, free = model(), model(), model()
    options = {"max_steps": 1, "warmup_steps": 0}
    trainer, _ = train(clipped, tmp_path, max_grad_norm=1e-3, **options)
    train(free, tmp_path, max_grad_norm=1e6, **options)
    routed = set(trainer.optimizer.param_groups[0]["param_names"])
    matrices = [[p for n, p in network.named_parameters() if n in routed] for network in (start, free, clipped)]
    assert relative_difference(*matrices) < 1e-4


@pytest.mark.slow
@pytest.mark.extended
def test_torch_compile(tmp_path):
    ours = model()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "optim_args": "ns_dtype=fp32"}
    trainer, _ = train(ours, tmp_path, **options)
    assert_close(ours.state_dict())
    names = [name for group in trainer.optimizer.param_groups for name in group["param_names"]]
    assert not any("_orig_mod" in name for name in names)


@pytest.mark.promise("lora")
def test_lora(tmp_path):
    start, ours, theirs = lora(), lora(), lora()
    trainer, losses = train(ours, tmp_path, optim_args="lora=muon")
    _, expected = by_hand(theirs, lora="muon")
    assert_same(start, ours, theirs, losses, expected)
    muon = trainer.optimizer.param_groups[0]
    assert muon["use_muon"]
    assert len(muon["params"]) == 8
    assert all("lora_" in name for name in muon["param_names"])


def test_frozen_layers(tmp_path):
    ours, theirs = model(), model()
    for network in (ours, theirs):
        network.model.layers[0].requires_grad_(False)
    start = copy.deepcopy(ours)
    _, losses = train(ours, tmp_path)
    _, expected = by_hand(theirs)
    assert_same(start, ours, theirs, losses, expected)
    assert moved(list(start.model.layers[0].parameters()), list(ours.model.layers[0].parameters())) == 0


def test_the_log_and_a_file_have_the_metrics_and_weights_do_not_differ(tmp_path):
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
        if entry["step"] not in steps:
            assert not any(key.startswith("muon/") for key in entry)
            continue
        line = steps[entry["step"]]
        values = [value for value in line["orthogonality_error"] if value is not None]
        assert entry["muon/orthogonality_error"] == pytest.approx(sum(values) / len(values), rel=1e-4)
        updates = [value for value in line["relative_update"] if value is not None]
        assert entry["muon/relative_update"] == pytest.approx(statistics.median(updates), rel=1e-4)
        assert len([key for key in entry if key.startswith("muon/")]) <= 3  # the console prints them all


def test_a_step_of_gradients_that_are_not_finite_is_refused_by_name(tmp_path):
    network = model()
    network.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: torch.full_like(grad, float("nan")))
    before = copy.deepcopy(network)
    # Trainer clips by the total norm, which makes every gradient NaN.
    with pytest.raises(RuntimeError, match=r"refuses this step.*\n.*every parameter .* 25 in all"):
        train(network, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before.parameters(), strict=True))


# --- options, of `optim_args` and of TrainingArguments


def test_optim_args_as_a_mapping(tmp_path):
    """Accept the mapping that a YAML file may hold, which transformers itself cannot split."""
    args = arguments(tmp_path, optim_args={"momentum": 0.8, "nesterov": False, "adamw_betas": [0.5, 0.6]})
    config = Trainer.get_optimizer_cls_and_kwargs(args)[1]["config"]
    assert (config.momentum, config.nesterov, config.adamw_betas) == (0.8, False, (0.5, 0.6))


class TestOptions:
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
            trainer, _ = train(model(), tmp_path, **options)
        groups = trainer.optimizer.param_groups
        assert len({group["lr"] for group in groups}) == 1, "both halves follow the schedule"
        assert {group["step"] for group in groups} == {2}

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


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
def test_axes_that_are_not_refused(tmp_path, axis):
    args = arguments(tmp_path)
    args.parallelism_config = SimpleNamespace(**{f"{axis}_size": 2, "cp_size": 1, "sp_size": None})
    assert Trainer.get_optimizer_cls_and_kwargs(args, model())


# --- qk_clip

CLIP = 0.1  # some heads are beyond it
CLIPPED = f"ns_dtype=fp32,qk_clip={CLIP}"


def test_trainer_clips_heads_as_a_loop_does_and_logs_it(tmp_path):
    ours, theirs = make("llama"), make("llama")
    trainer, losses = train(ours, tmp_path, optim_args=f"{CLIPPED},diagnostics_every=1", logging_steps=1)
    optimizer, expected = by_hand(theirs, ns_dtype="fp32", qk_clip=CLIP)
    assert_same(make("llama"), ours, theirs, losses, expected)
    logged = [entry for entry in trainer.state.log_history if "muon/max_logit" in entry]
    assert len(logged) == STEPS
    assert sum(entry["muon/clipped_heads"] for entry in logged) > 0
    without = make("llama")
    by_hand(without, ns_dtype="fp32")
    assert not all(torch.equal(a, b) for a, b in zip(without.parameters(), ours.parameters(), strict=True))
    assert optimizer.param_groups[0]["qk_clip"] == CLIP


def test_a_resumed_run_with_qk_clip_is_the_uninterrupted_one(tmp_path):
    straight, resumed = make("llama"), make("llama")
    train(straight, tmp_path / "straight", optim_args=CLIPPED, save_steps=STEPS // 2, save_strategy="steps")
    half = tmp_path / "straight" / f"checkpoint-{STEPS // 2}"
    train(resumed, tmp_path / "resumed", resume=str(half), optim_args=CLIPPED)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


# --- a script

SCRIPT = Path(__file__).with_name("plain_script.py")


WITHOUT_CLI = """
import runpy, sys
sys.modules.update(dict.fromkeys(["plotly", "rich", "typer"]))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.newest
class TestProcesses:
    @pytest.mark.promise("no-import")
    def test_script_without_our_import(self, tmp_path):
        """Compare a script that does not import hf_muon with the loop, where no package of the extra cli is there."""
        expected = model()
        by_hand(expected, ns_dtype="fp32")
        watched = {"OMP_NUM_THREADS": "1", "HF_MUON_STEP_REPORT": "1", "HF_MUON_DIAGNOSTICS_EVERY": "2"}
        command = [sys.executable, "-c", WITHOUT_CLI, SCRIPT, "muon", tmp_path / "weights.pt"]
        process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **watched})
        assert process.returncode == 0, process.stderr
        weights = torch.load(tmp_path / "weights.pt", weights_only=True)
        ours = [weights[name] for name, _ in expected.named_parameters()]
        assert relative_difference(list(model().parameters()), list(expected.parameters()), ours) < 1e-6
