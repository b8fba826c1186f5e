"""MuonConfig: its defaults and checks, `optim_args` and YAML, and the texts generated from its declarations."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_muon import Muon, MuonConfig
from hf_muon.config import MUON_OPTIONS, OPTIMIZER_OPTIONS, OPTIONS
from hf_muon.optim_args import parse_optim_args, text_of
from hf_muon.rules import registry
from tests import option_table


def test_the_page_holds_todays_tables_with_every_option_once():
    page = option_table.PAGE.read_text()
    message = "docs/options.md is outdated: run `python -m tests.option_table`"
    assert page == option_table.with_tables(page), message
    assert [page.count(f"\n| `{name}` |") for name in OPTIONS] == [1] * len(OPTIONS)
    assert "## Others" not in page, "put new options into a section of tests/option_table.py"


def test_an_outdated_page_is_noticed():
    page = option_table.PAGE.read_text()
    assert option_table.with_tables(page.replace("`ns_steps`", "`ns_step`")) == page
    with pytest.raises(AssertionError, match="lacks the lines"):
        option_table.with_tables("")


@pytest.mark.parametrize("name", OPTIONS)
def test_docstrings_and_errors_follow_from_the_declaration(name):
    option = OPTIONS[name]
    words = " ".join(inspect.getdoc(MuonConfig).split())
    assert f" {name}: {option.meaning}" in words
    assert (f" {name}: {option.meaning}" in " ".join(inspect.getdoc(Muon).split())) is (option.scope != "model")
    assert all(f"`{word}`" in option.meaning for word in option.type.choices)
    with pytest.raises(ValueError, match=re.escape(f"Valid: {option.type.valid}")):
        MuonConfig(**{name: object()})


def test_arguments_of_muon_are_the_options_that_it_holds():
    arguments = dict(inspect.signature(Muon).parameters)
    assert set(arguments) == {"params", "replicate_group", "diagnostics_file", "rules", *MUON_OPTIONS} - set(
        registry.option_names()
    )
    wider = {"lr": "float | Tensor"}
    types = {field.name: field.type for field in dataclasses.fields(MuonConfig)}
    for name in set(MUON_OPTIONS) - set(registry.option_names()):
        assert arguments[name].default == OPTIONS[name].default == MuonConfig().value_of(name)
        assert arguments[name].annotation == wider.get(name, types[name])
    assert all(Muon.__annotations__[name] == types[name] for name in OPTIMIZER_OPTIONS)


def test_optim_args_are_typed():
    text = "momentum=0.9, ns_steps=6,adamw_lr=1e-5,adamw_patterns=router|gate,nesterov=false,adamw_betas=0.9|0.95"
    config = MuonConfig.from_mapping(parse_optim_args(text))
    assert config == MuonConfig(
        momentum=0.9, ns_steps=6, adamw_lr=1e-5, adamw_patterns="router|gate", nesterov=False, adamw_betas=(0.9, 0.95)
    )
    assert isinstance(config.ns_steps, int)


def test_yaml_numbers_that_pyyaml_reads_as_text():
    mapping = yaml.safe_load("lr: 1e-5\nweight_decay: 0.1\nns_coefficients: [3.4445, -4.775, 2.0315]\nnesterov: true")
    assert mapping["lr"] == "1e-5"
    config = MuonConfig.from_mapping(mapping)
    assert config.lr == 1e-5
    assert config.ns_coefficients == (3.4445, -4.775, 2.0315)


def test_three_coefficients_as_text():
    assert MuonConfig.from_mapping({"ns_coefficients": "1.5|-0.5|0"}).ns_coefficients == (1.5, -0.5, 0.0)


LIST = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))


@pytest.mark.parametrize(
    "value", [LIST, [list(triple) for triple in LIST], "3|-3.2|1.2|2|-1.5|0.5", "3.0|-3.2|1.2|2.0|-1.5|0.5"], ids=str
)
def test_coefficients_of_each_step(value):
    config = MuonConfig.from_mapping({"ns_coefficients": value})
    assert (config.ns_coefficients, config.ns_steps) == (LIST, "auto")
    assert MuonConfig.from_mapping(parse_optim_args(text_of({"ns_coefficients": value}))) == config
    assert MuonConfig.from_mapping({"ns_coefficients": value, "ns_steps": 2}).ns_steps == 2
    (group,) = Muon([nn.Parameter(torch.zeros(2, 2))], ns_coefficients=config.ns_coefficients).param_groups
    assert (group["ns_coefficients"], group["ns_steps"]) == (LIST, 2)


def test_a_list_of_coefficients_in_yaml():
    mapping = yaml.safe_load("ns_coefficients: [[3, -3.2, 1.2], [2, -1.5, 0.5]]\nns_steps: auto")
    assert MuonConfig.from_mapping(mapping) == MuonConfig(ns_coefficients=LIST)
    with pytest.raises(ValueError, match="is not valid: a list of one step; write its three numbers, and ns_steps: 1"):
        MuonConfig(ns_coefficients=LIST[:1])


@given(st.lists(st.tuples(*[st.floats(-50, 50)] * 3), min_size=2, max_size=12))
def test_property_coefficients_of_each_step_as_text(triples):
    config = MuonConfig(ns_coefficients=triples)
    assert MuonConfig.from_mapping(parse_optim_args(text_of({"ns_coefficients": triples}))) == config


@pytest.mark.parametrize(("preset", "steps"), [("polar_express", 5), ("deepseek_v4", 10)])
def test_a_preset_brings_its_number_of_steps(preset, steps):
    config = MuonConfig.from_mapping(parse_optim_args(f"ns_coefficients={preset}"))
    assert config.replace({"momentum": 0.9}).ns_steps == "auto"
    weight = nn.Parameter(torch.zeros(2, 2))
    (group,) = Muon([weight], ns_coefficients=config.ns_coefficients, ns_steps=config.ns_steps).param_groups
    assert group["ns_steps"] == steps
    (group,) = Muon([{"params": [weight], "ns_coefficients": preset}]).param_groups
    assert group["ns_steps"] == steps


def test_empty_optim_args():
    assert parse_optim_args(None) == parse_optim_args("") == {}


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MuonConfig().lr = 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "moment=0.9",
            r"'moment' is not an option of muon. Did you mean 'momentum'\? Valid: lr, weight_decay, muon_lr",
        ),
        ("momentum", r"'momentum' is not of the form name=value.*Valid names: lr"),
        ("momentum=", "not of the form name=value"),
        ("=3", "not of the form name=value"),
        ("momentum=0.9,", "'' is not of the form name=value"),
        ("adamw_patterns=a=b", "cannot hold a comma or an equals sign"),
        ("momentum=0.9,momentum=0.8", "momentum is given twice, '0.9' and '0.8'"),
        ("momentum=high", "momentum=high cannot be read. Valid: a number from 0 to below 1"),
        ("ns_steps=5.5", "ns_steps=5.5 cannot be read. Valid: auto, or an integer from 1 to 99"),
        ("nesterov=maybe", "nesterov=maybe cannot be read. Valid: true or false"),
        ("adamw_betas=0.9", "adamw_betas=.* is not valid. Valid: two numbers from 0 to below 1, written 0.9|0.95"),
        ("momentum=1.5", "momentum=1.5 is not valid"),
        ("ns_steps=0", "ns_steps=0 is not valid"),
        ("lr=-1", "lr=-1.0 is not valid. Valid: a number of at least 0"),
        ("lr=inf", "lr=inf is not valid"),
        ("adamw_lr=nan", "adamw_lr=nan is not valid"),
        ("ns_coefficients=quintic", "you_jiacheng, cans, deepseek_v4, or three numbers, written"),
        ("ns_coefficients=1|2|3|4", "ns_coefficients=.* is not valid. Valid: polar_express.*three for each step"),
        (
            "ns_coefficients=deepseek_v4,ns_steps=8",
            "'deepseek_v4' is a sequence of exactly 10 steps. Set ns_steps=10",
        ),
        ("ns_coefficients=1|2|3|4|5|6,ns_steps=3", "ns_steps=3: ns_coefficients lists 2 steps"),
        ("update_rms=0", "update_rms=0.0 is not valid. Valid: a number above 0"),
        ("update_rms=0.3,adjust_lr_fn=original", "update_rms=0.3 is the constant of adjust_lr_fn=match_rms_adamw"),
        ("ns_coefficients=you_jiacheng,ns_steps=3", "exactly 5 steps"),
        ("ns_dtype=float32", "ns_dtype='float32' is not valid. Valid: auto, bf16, fp16 or fp32"),
        ("adjust_lr_fn=none", "Valid: match_rms_adamw, original or spectral_unclamped"),
        ("lora=yes", "lora='yes' is not valid. Valid: adamw, muon or muon_b"),
    ],
)
def test_bad_optim_args(text, message):
    with pytest.raises(ValueError, match=message):
        MuonConfig.from_mapping(parse_optim_args(text))


FLAGS = ("nesterov", "per_head")


@pytest.mark.parametrize("name", [n for n in MuonConfig.names() if n != "lora"])
@pytest.mark.parametrize("value", [object(), {"a": 1}, [], True])
def test_values_of_the_wrong_type_are_refused(name, value):
    if value is True and name in FLAGS:
        return
    if value == {"a": 1} and name == "lr_scales":
        return
    with pytest.raises(ValueError, match=f"{name}=.* is not valid"):
        MuonConfig(**{name: value})


@given(
    momentum=st.floats(0, 0.999),
    ns_steps=st.integers(1, 99),
    lr=st.floats(0, 10),
    nesterov=st.booleans(),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
)
def test_property_text_round_trip(momentum, ns_steps, lr, nesterov, betas):
    text = (
        f"momentum={momentum!r},ns_steps={ns_steps},muon_lr={lr!r},nesterov={str(nesterov).lower()},"
        f"adamw_betas={betas[0]!r}|{betas[1]!r}"
    )
    config = MuonConfig.from_mapping(parse_optim_args(text))
    expected = MuonConfig(momentum=momentum, ns_steps=ns_steps, muon_lr=lr, nesterov=nesterov, adamw_betas=betas)
    assert config == expected


@given(st.text(max_size=40))
def test_property_any_text_parses_or_is_a_value_error(text):
    with contextlib.suppress(ValueError):
        MuonConfig.from_mapping(parse_optim_args(text))
