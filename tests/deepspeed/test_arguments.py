"""Arguments of `initialize`: all that DeepSpeed takes, and the errors for wrong ones."""

from __future__ import annotations

import json

import pytest
import torch

from hf_muon import build_optimizer
from hf_muon.integrations.deepspeed.engine import initialize
from tests.deepspeed.starting_cases import WAYS, step_once

pytestmark = pytest.mark.usefixtures("quiet")


def model_of(width=4):
    return torch.nn.Sequential(torch.nn.Linear(width, 3), torch.nn.Linear(3, 2))


def muon_of(model):
    return build_optimizer(model, muon_patterns="weight")


def test_every_way_of_deepspeed_starts_the_same_run(ranks, tmp_path):
    expected = ranks.run(step_once, way=WAYS[0], folder=str(tmp_path))[0]
    for way in WAYS[1:]:
        for weights in ranks.run(step_once, way=way, folder=str(tmp_path)):
            assert all(torch.equal(weight, weights[name]) for name, weight in expected.items()), way


@pytest.mark.parametrize("kind", [torch.optim.AdamW, None])
def test_another_optimizer(kind):
    model = model_of()
    optimizer = None if kind is None else kind(model.parameters())
    words = "optimizer is missing" if kind is None else "optimizer is of class AdamW"
    with pytest.raises(ValueError, match=f"{words}.*build_optimizer\\(model\\), or call deepspeed.initialize for"):
        initialize(model=model, optimizer=optimizer, config={})


def test_a_function_that_makes_another_optimizer():
    with pytest.raises(ValueError, match="optimizer is of class SGD"):
        initialize(model=model_of(), optimizer=lambda params: torch.optim.SGD(params, lr=1), config={})


def test_another_models_optimizer():
    with pytest.raises(ValueError, match=r"steps 0\.weight \(3, 4\).* the model that is given with it has no such"):
        initialize(model=model_of(), optimizer=muon_of(model_of()), config={})


def test_the_optimizer_of_a_model_whose_head_was_replaced():
    model = model_of()
    optimizer = muon_of(model)
    model[1] = torch.nn.Linear(3, 5)
    with pytest.raises(ValueError, match=r"steps 1\.weight \(2, 3\), 1\.bias \(2,\), and .* Build it over"):
        initialize(model=model, optimizer=optimizer, config={})


@pytest.mark.parametrize(("config", "kind"), [(None, "NoneType"), (3, "int"), ("[1]", "list")])
def test_a_config_that_is_no_mapping(config, kind, tmp_path):
    model = model_of()
    if config == "[1]":
        config = tmp_path / "config.json"
        config.write_text("[1]")
    with pytest.raises(ValueError, match=f"config is of type {kind}. Give a mapping"):
        initialize(model=model, optimizer=muon_of(model), config=config)


def test_the_callers_config_is_left_as_it_was():
    model, config = model_of(), {"zero_optimization": {"stage": 1, "zenflow": {"topk_ratio": 0.1}}}
    before = json.dumps(config)
    with pytest.raises(RuntimeError, match="zenflow"):
        initialize(model=model, optimizer=muon_of(model), config=config)
    assert json.dumps(config) == before
