"""Rules of other packages: registered, in every layout, resumed, refused where names are taken."""

from __future__ import annotations

import importlib.metadata
import logging
import re

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hf_muon import Muon, MuonConfig, build_optimizer
from hf_muon.optim_args import parse_optim_args
from hf_muon.rules import Option, Rule, register, registry, types
from tests.distributed.cases import VIEWS
from tests.distributed.test_layouts import assert_equal
from tests.optimizer.cases import gradients, parameters, run
from tests.rules import others
from tests.rules.test_layouts import LAYOUTS


@pytest.fixture
def rules():
    """Register the rules of `others`, and forget them."""
    with others.registered() as rules:
        yield rules


@pytest.mark.parametrize("option", others.RULES)
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_given_equal_gradients_every_layout_gives_the_bits_of_one_process(rules, pools, layout, ranks, option):
    for options in ({}, {"viewed": VIEWS}, {"momentum_dtype": "bf16", "dtype": "bfloat16"}):
        options = {option: True, **options}
        expected = others.given(0, "single", **options)
        assert_equal(pools[ranks].run(others.given, layout=layout, **options), expected)


def test_normuon_of_others_is_ours(rules):
    ours, theirs, grads = parameters(), parameters(), gradients()
    run(Muon(ours, normalize="rows"), ours, grads)
    run(Muon(theirs, their_normalize=True), theirs, grads)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(ours, theirs, strict=True))


def test_state_of_every_kind_moves_between_layouts_and_resumes(rules, pools, tmp_path):
    path = str(tmp_path / "checkpoint")
    options = {"their_everything": True, "their_normalize": True}
    saved = pools[2].run(others.trained, layout="fsdp", last=3, save=path, **options)[0]["states"]
    for ranks, layout in ((4, "hsdp"), (2, "tp")):
        loaded = pools[ranks].run(others.trained, layout=layout, first=3, last=3, load=path, **options)[0]["states"]
        for name, state in saved.items():
            assert state.keys() == loaded[name].keys()
            assert all(torch.equal(value, loaded[name][key]) for key, value in state.items()), name
    straight = pools[2].run(others.trained, layout="fsdp", last=5, **options)[0]["states"]
    resumed = pools[2].run(others.trained, layout="fsdp", first=3, last=5, load=path, **options)[0]["states"]
    for name, state in straight.items():
        assert all(torch.equal(value, resumed[name][key]) for key, value in state.items()), name


def test_options_are_read_as_those_of_muon_are(rules):
    config = MuonConfig.from_mapping(parse_optim_args("their_normalize=true,their_beta=0.5,momentum=0.9"))
    assert config.rules == {"their_normalize": True, "their_beta": 0.5}
    optimizer = build_optimizer(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)), config)
    assert optimizer.param_groups[0]["their_beta"] == 0.5
    with pytest.raises(ValueError, match=re.escape("their_beta=2.0 is not valid")):
        MuonConfig.from_mapping({"their_beta": "2"})
    with pytest.raises(ValueError, match="Did you mean 'their_beta'"):
        parse_optim_args("their_betas=0.5")


def test_an_entry_point_is_loaded_when_its_option_is_first_used(monkeypatch):
    points = [importlib.metadata.EntryPoint("theirs", "tests.rules.others:NORMUON", registry.ENTRY_POINTS)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    registry.load_entry_points.cache_clear()
    try:
        assert MuonConfig.from_mapping({"their_normalize": "true"}).rules == {"their_normalize": True}
        points[:] = [importlib.metadata.EntryPoint("gone", "tests.rules.others:GONE", registry.ENTRY_POINTS)]
        registry.load_entry_points.cache_clear()
        with pytest.raises(
            RuntimeError, match=re.escape("'gone' of tests.rules.others:GONE cannot be loaded: AttributeError")
        ):
            MuonConfig.from_mapping({"unknown": "true"})
    finally:
        registry.OTHERS_OPTIONS.clear()
        registry.load_entry_points.cache_clear()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "normalize"}, "the rule 'normalize' exists"),
        ({"options": {"lr": Option(types.flag(), False, "", scope="group")}}, "the option 'lr' exists"),
        ({"state": {"momentum_buffer": "row"}}, "the state 'momentum_buffer' exists"),
        ({"state": {"update": "row"}}, "the state 'update' exists"),  # update_rms is measured already
        ({"direction": None}, "has no function. Give it one of"),
        ({"options": {"new": Option(types.flag(), False, "")}}, "has the option 'new', whose scope is not 'group'"),
    ],
)
def test_rules_that_cannot_be_registered(changes, message):
    options = {"another": Option(types.flag(), False, "", scope="group")}
    rule = {"name": "another", "options": options, "is_on": bool, "direction": others.rows_normalized, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        register(Rule(**rule))
    assert "another" not in registry.RULES


def test_only_rules_are_registered():
    with pytest.raises(ValueError, match=re.escape("register takes a hf_muon.rules.Rule, not 'normuon'")):
        register("normuon")


@pytest.mark.parametrize("form", ["plain", "sharded", "full"])
def test_a_checkpoint_of_a_rule_that_is_not_registered_says_so(form, caplog):
    """torch raises before hf_muon sees a full state with options that this run's param groups lack."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    options = StateDictOptions(full_state_dict=form == "full")
    with others.registered():
        before = build_optimizer(model, their_everything=True)
        model(torch.randn(2, 8)).square().mean().backward()
        before.step()
        before.zero_grad()
        state = before.state_dict() if form == "plain" else get_optimizer_state_dict(model, before, options=options)
    after = build_optimizer(model)
    if form == "full":
        with pytest.raises(KeyError, match=r"param_groups\.0\.their_"):
            set_optimizer_state_dict(model, after, state, options=options)
        return
    with caplog.at_level(logging.WARNING):
        if form == "plain":
            after.load_state_dict(state)
        else:
            set_optimizer_state_dict(model, after, state)
    assert (
        "the checkpoint's param groups have their_normalize=False, their_beta=0.95, their_everything=True, "
        in caplog.text
    )
    assert "import that package or call hf_muon.rules.register before you build the optimizer" in caplog.text
    assert "their_squares, their_pull" in caplog.text
    caplog.clear()
    build_optimizer(model).load_state_dict(build_optimizer(model).state_dict())
    assert "no option here" not in caplog.text
