"""`optim: muon` through Trainer, compared with the same training written by hand."""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_muon import Muon
from tests.integrations.plain_script import BATCH, OPTIONS, STEPS, model
from tests.integrations.trainer_runs import assert_close, assert_same, by_hand, lora, train
from tests.reference import moved, relative_difference


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
def test_torch_compile(tmp_path):
    ours = model()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "optim_args": "ns_dtype=fp32"}
    trainer, _ = train(ours, tmp_path, **options)
    assert_close(ours.state_dict())
    names = [name for group in trainer.optimizer.param_groups for name in group["param_names"]]
    assert not any("_orig_mod" in name for name in names)


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
            if entry["step"] not in steps:
                assert not any(key.startswith("muon/") for key in entry)
                continue
            line = steps[entry["step"]]
            values = [value for value in line["orthogonality_error"] if value is not None]
            assert entry["muon/orthogonality_error"] == pytest.approx(sum(values) / len(values), rel=1e-4)
            updates = [value for value in line["relative_update"] if value is not None]
            assert entry["muon/relative_update"] == pytest.approx(statistics.median(updates), rel=1e-4)
            assert len([key for key in entry if key.startswith("muon/")]) <= 3  # the console prints them all


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


SCRIPT = Path(__file__).with_name("plain_script.py")


WITHOUT_CLI = """
import runpy, sys
sys.modules.update(dict.fromkeys(["plotly", "rich", "typer"]))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


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
        """Compare a script that does not import hf_muon with the loop, where no package of the extra cli is there."""
        watched = {"HF_MUON_STEP_REPORT": "1", "HF_MUON_DIAGNOSTICS_EVERY": "2"}
        weights = run_script(tmp_path / "weights.pt", "muon", launcher=("-c", WITHOUT_CLI), **watched)
        ours = [weights[name] for name, _ in expected.named_parameters()]
        assert relative_difference(list(model().parameters()), list(expected.parameters()), ours) < 1e-6

    def test_two_processes(self, tmp_path):
        """Compare DDP with the same global batch to the loop; DDP sums gradients in another order."""
        launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone")
        weights = run_script(tmp_path / "weights.pt", "muon", str(BATCH // 2), launcher=launcher)
        assert_close(weights)

    @pytest.mark.extended
    def test_adamw_runs_are_untouched(self, tmp_path):
        on = run_script(tmp_path / "on.pt", "adamw_torch")
        off = run_script(tmp_path / "off.pt", "adamw_torch", HF_MUON_AUTOLOAD="0")
        assert on.keys() == off.keys()
        assert all(torch.equal(on[name], off[name]) for name in on)
