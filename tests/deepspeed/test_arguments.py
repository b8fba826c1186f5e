"""Arguments of `initialize`: all that DeepSpeed takes, and the errors for wrong ones."""

from __future__ import annotations

import argparse
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
    with pytest.raises(ValueError, match=r"4 of the 4 parameters .* not parameters of the model .* 0\.weight \(3, 4\)"):
        initialize(model=model_of(), optimizer=muon_of(model_of()), config={})


def test_the_optimizer_of_a_model_whose_head_was_replaced():
    model = model_of()
    optimizer = muon_of(model)
    model[1] = torch.nn.Linear(3, 5)
    with pytest.raises(
        ValueError, match=r"2 of the 4 parameters .* 1\.weight \(2, 3\), 1\.bias \(2,\)\. Build it over"
    ):
        initialize(model=model, optimizer=optimizer, config={})


def test_no_model():
    with pytest.raises(ValueError, match="model is missing"):
        initialize(optimizer=muon_of(model_of()), config={})


CONFIGS = {
    "0 DeepSpeed configs were given": {},
    "2 DeepSpeed configs were given, in config and args.deepspeed_config": {
        "config": {},
        "args": argparse.Namespace(deepspeed_config="x.json"),
    },
    "config nowhere.json cannot be read as a JSON file: .*No such file": {"config": "nowhere.json"},
    "config nowhere2.json cannot be read": {"args": argparse.Namespace(deepspeed_config="nowhere2.json")},
    "config is of type int": {"config": 3},
    "config is of type list": {"config": "[1]"},
    "broken.json cannot be read as a JSON file": {"config": '{"zero_optimization": {"stage": 2}'},
    "broken.json cannot be read as a JSON file: Duplicate keys .*stage": {"config": '{"stage": 2, "stage": 3}'},
    "broken.json cannot be read as a JSON file: .*utf-8": {"config": b'{"stage": "\xff"}'},
}


@pytest.mark.parametrize("words", CONFIGS)
def test_a_config_that_cannot_be_read(words, tmp_path):
    model, arguments = model_of(), dict(CONFIGS[words])
    content = arguments.get("config")
    if "broken" in words or content == "[1]":
        file = tmp_path / "broken.json"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        arguments["config"] = str(file)
    with pytest.raises(ValueError, match=words):
        initialize(model=model, optimizer=muon_of(model), **arguments)


def test_the_callers_config_is_left_as_it_was():
    model, config = model_of(), {"zero_optimization": {"stage": 1, "zenflow": {"topk_ratio": 0.1}}}
    before = json.dumps(config)
    with pytest.raises(RuntimeError, match="zenflow"):
        initialize(model=model, optimizer=muon_of(model), config=config)
    assert json.dumps(config) == before
