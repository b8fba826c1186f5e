"""What is only warned of: the run goes on, in a way that its user may not expect."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from hf_muon.distributed.ddp import Replicas
from hf_muon.integrations import names
from hf_muon.integrations.transformers import run_refusals
from hf_muon.integrations.transformers.callback import MuonCallback
from hf_muon.math import compiler
from hf_muon.optimizer.sharded_checkpoints import loading_from
from tests.optimizer.cases import gradients, parameters, run, stepped
from tests.refusals import table
from tests.rules.test_scales import net
from tests.support.accelerated import compiling


def scaled(scales: str) -> Muon:
    return build_optimizer(net(), lr_scales=scales)


def other_rules() -> None:
    weights = parameters()
    saved = Muon(weights)
    run(saved, weights, gradients(steps=1))
    Muon(parameters(), normalize="rows").load_state_dict(saved.state_dict())


def without_an_option() -> None:
    optimizer = stepped()[1]
    state = optimizer.state_dict()
    group = state["param_groups"][0]
    group["hf_muon"] = group["hf_muon"].replace('"nesterov": true, ', "")
    optimizer.load_state_dict(state)


def two_rates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Take the rate of optim_args twice; with one rate, or without a learning_rate, say nothing."""
    from transformers import TrainingArguments

    names.warn_once.cache_clear()
    for more in ({}, {"learning_rate": 1e-3}, {"learning_rate": 2e-3}, {"learning_rate": 2e-3}):
        assert not caplog.records or more["learning_rate"] == 2e-3
        TrainingArguments(str(tmp_path), optim="muon", optim_args="lr=1e-3", use_cpu=True, report_to=[], **more)
    assert len(caplog.records) == 1


def without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = nn.Linear(6, 4)
    optimizer = build_optimizer(
        model, muon_patterns="weight", diagnostics_every=1, diagnostics_file=str(tmp_path / "file" / "metrics.jsonl")
    )
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()


def shards_of_nothing(tmp_path: Path) -> None:
    with loading_from(stepped()[1], tmp_path):
        pass


def sharded_by_an_old_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(state_dict_type="SHARDED_STATE_DICT")
    monkeypatch.setattr(run_refusals, "accelerator_state", lambda: SimpleNamespace(fsdp_plugin=plugin))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.12.0")
    run_refusals.warn_of_shards()


def begun_without_moments() -> None:
    args, state = SimpleNamespace(optim="muon"), SimpleNamespace(global_step=2)
    MuonCallback().on_train_begin(args, state, None, optimizer=Muon(parameters()))


def unfrozen_later(caplog: pytest.LogCaptureFixture) -> None:
    """Freeze a layer that is stepped, and make trainable what is not, one layer after the other; it is said once."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    model[1:].requires_grad_(False)
    optimizer = build_optimizer(model, muon_patterns=r"\.weight")
    model[4].requires_grad_()  # before the training begins, by somebody who wants it so
    callback, args, state = MuonCallback(), SimpleNamespace(optim="muon"), SimpleNamespace(global_step=0)
    callback.on_train_begin(args, state, None, model=model, optimizer=optimizer)
    stepped = model[0].weight
    model[0].weight = nn.Parameter(stepped.detach())  # as FSDP2 leaves a model after an evaluation
    callback.on_log(args, state, None, {"loss": 1.0}, model=model, optimizer=optimizer)
    model[0].weight = stepped
    model[0].requires_grad_(False)
    callback.on_log(args, state, None, {"loss": 1.0}, model=model, optimizer=optimizer)
    assert not [line for line in caplog.messages if "trainable since" in line]
    for layer in (1, 2):
        model[layer].requires_grad_()
        callback.on_log(args, state, None, {"loss": 1.0}, model=model, optimizer=optimizer)
    assert sum("trainable since" in line for line in caplog.messages) == 1


def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_why_not", lambda *_: "there is no compiler")
    with compiling():
        stepped()


def other_scales() -> None:
    scaled("embed:0.25").load_state_dict(scaled("embed:2").state_dict())


LOAD, STEP = "load_state_dict", "Muon.step"
CASES = [
    *table(
        [
            ("lr-scales-of-run", LOAD, other_scales, "lr x 0.25, there 2"),
            ("rules-of-run", LOAD, other_rules, "normalize"),
            ("options-of-run", LOAD, without_an_option, "nesterov"),
            ("metrics-not-written", STEP, without_a_folder, "metrics.jsonl"),
            ("unreadable-shards", "loading_from", shards_of_nothing, "metadata"),
            ("shards-not-loadable", "Trainer", sharded_by_an_old_accelerate, r"1\.12\.0"),
            ("two-learning-rates", "TrainingArguments", two_rates, "lr=0.001 .*learning_rate=0.002"),
            ("no-optimizer-state", "Trainer", begun_without_moments, "optimizer.pt"),
            ("unfrozen-later", "Trainer", unfrozen_later, r"1\.bias, 1\.weight have become"),
            ("ranks-part", STEP, lambda: Replicas().part(), "no_sync"),
            ("not-compiled", STEP, without_a_compiler, "no compiler"),
        ],
        error=None,
    ),
]
