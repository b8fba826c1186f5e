"""Rules of other packages: registered, seen in metrics, and refused where names are taken.

`tests.equality` steps them in every layout.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hf_muon import Muon, MuonConfig, build_optimizer, route_parameters
from hf_muon.optim_args import parse_optim_args
from hf_muon.plan import facts_of, numbers_of
from hf_muon.rules import registry
from tests.optimizer.cases import gradients, parameters, run
from tests.rules import others


@pytest.fixture
def rules():
    """Register the rules of `others`, and forget them."""
    with others.registered() as rules:
        yield rules


@pytest.mark.promise("own-rule")
def test_normuon_of_others_is_ours(rules):
    ours, theirs, grads = parameters(), parameters(), gradients()
    run(Muon(ours, normalize="rows"), ours, grads)
    run(Muon(theirs, their_normalize=True), theirs, grads)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(ours, theirs, strict=True))


def test_options_are_read_as_those_of_muon_are(rules):
    config = MuonConfig.from_mapping(parse_optim_args("their_normalize=true,their_beta=0.5,momentum=0.9"))
    assert config.rules == {"their_normalize": True, "their_beta": 0.5}
    optimizer = build_optimizer(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)), config)
    assert optimizer.param_groups[0]["their_beta"] == 0.5


def test_an_entry_point_is_loaded_when_its_option_is_first_used(monkeypatch):
    points = [importlib.metadata.EntryPoint("theirs", "tests.rules.others:NORMUON", registry.ENTRY_POINTS)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    registry.load_entry_points.cache_clear()
    try:
        assert MuonConfig.from_mapping({"their_normalize": "true"}).rules == {"their_normalize": True}
    finally:
        registry.OTHERS_OPTIONS.clear()
        registry.load_entry_points.cache_clear()


@pytest.mark.parametrize("form", ["plain", "sharded", "full"])
def test_a_checkpoint_of_a_rule_that_is_not_registered_says_so(form, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    options = StateDictOptions(full_state_dict=form == "full")
    with others.registered():
        before = build_optimizer(model, their_everything=True)
        model(torch.randn(2, 8)).square().mean().backward()
        before.step()
        before.zero_grad()
        state = before.state_dict() if form == "plain" else get_optimizer_state_dict(model, before, options=options)
    after = build_optimizer(model)
    with caplog.at_level(logging.WARNING):
        if form == "plain":
            after.load_state_dict(state)
        else:
            set_optimizer_state_dict(model, after, state, options=options)
    assert "the checkpoint's param groups have " in caplog.text
    assert "their_beta=0.95, their_everything=True, their_normalize=False, " in caplog.text
    assert "import that package or call hf_muon.rules.register before you build the optimizer" in caplog.text
    assert "their_squares, their_pull" in caplog.text
    caplog.clear()
    build_optimizer(model).load_state_dict(build_optimizer(model).state_dict())
    assert "no option here" not in caplog.text


def test_a_plan_counts_the_state_of_rules(rules):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 4))
    configs = [MuonConfig.from_mapping(own) for own in ({}, {"their_everything": True})]
    run = {"layout": "fsdp", "ranks": 2, "dtype": torch.bfloat16}
    plain, ruled = (numbers_of(facts_of(model, route_parameters(model), own, **run)).state for own in configs)
    like_weights, by_row = 6 * 8 + 6 * 6 + 4 * 6, 6 + 6 + 4
    assert sum(ruled) - sum(plain) == 2 * 4 * (like_weights + 2 * by_row), "two of each in fp32; rows on both ranks"


# --- options that rules change from step to step are measured


def lines_of(path, **options):
    weights = parameters()
    optimizer = Muon(weights, lr=0.1, weight_decay=0.25, diagnostics_every=2, diagnostics_file=str(path), **options)
    run(optimizer, weights, gradients(steps=2))
    return list(map(json.loads, path.read_text().splitlines()))


def test_options_that_rules_change_are_measured(rules, tmp_path):
    _, line = lines_of(tmp_path / "d.jsonl", their_everything=True)
    assert (line["muon_momentum"], line["muon_weight_decay"]) == (pytest.approx(0.82), 0.125)


@pytest.mark.parametrize(
    ("options", "momentum"), [({}, None), ({"momentum_warmup": 4, "normalize": "rows"}, 0.85 + 0.1 / 4)]
)
def test_a_schedule_of_hf_muons_own_is_measured_where_there_is_one(options, momentum, tmp_path):
    _, line = lines_of(tmp_path / "d.jsonl", **options)
    assert line.get("muon_momentum") == (momentum and pytest.approx(momentum))
