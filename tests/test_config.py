"""MuonConfig: its checks, `optim_args` and YAML, and what is generated from its declarations.

`tests/refusals/options.py` has what is refused; here mutated values and texts are taken, or refused with a code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_muon import Muon, MuonConfig, build_optimizer
from hf_muon.config import GROUP_OPTIONS, MUON_OPTIONS, OPTIMIZER_OPTIONS, OPTIONS
from hf_muon.optim_args import parse_optim_args, text_of
from hf_muon.optimizer import muon
from hf_muon.rules import registry
from scripts import option_table
from tests.refusals import codes_in


def read(text_or_mapping):
    return MuonConfig.from_mapping(parse_optim_args(text_or_mapping))


@pytest.mark.promise("options")
def test_the_page_holds_todays_tables_with_every_option_once():
    page = option_table.PAGE.read_text()
    message = "docs/options.md is outdated: run `python -m scripts.option_table`"
    assert page == option_table.with_tables(page), message
    assert [page.count(f"\n| `{name}` |") for name in OPTIONS] == [1] * len(OPTIONS)
    assert "## Others" not in page, "put new options into a section of scripts/option_table.py"
    assert option_table.with_tables(page.replace("`ns_steps`", "`ns_step`")) == page  # an outdated one is noticed


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
    own = set(MUON_OPTIONS) - set(registry.option_names())
    assert set(arguments) == {"params", "replicate_group", "diagnostics_file", "rules", *own}
    types = typing.get_type_hints(MuonConfig)
    for name in own:
        assert arguments[name].default == OPTIONS[name].default == MuonConfig().value_of(name)
        annotation = eval(arguments[name].annotation, vars(muon))
        assert annotation == (float | torch.Tensor if name == "lr" else types[name])


def test_muon_holds_the_options_that_it_is_given():
    """Each is given another value than its default."""
    of_run = {"max_batch_bytes": 1, "comm_dtype": "bf16", "diagnostics_every": 7}
    assert of_run.keys() == OPTIMIZER_OPTIONS.keys()
    of_groups = {
        "lr": 0.5,
        "weight_decay": 0.5,
        "momentum": 0.5,
        "nesterov": False,
        "ns_coefficients": (1.0, 2.0, 3.0),
        "ns_steps": 7,
        "ns_dtype": "fp32",
        "adjust_lr_fn": "original",
        "adamw_betas": (0.5, 0.25),
        "adamw_eps": 0.5,
        "momentum_dtype": "bf16",
        "adamw_state_dtype": "bf16",
        "weight_rounding": "nearest",
    }
    # No other scale than the default has a constant.
    assert of_groups.keys() == GROUP_OPTIONS.keys() - {"update_rms", *registry.option_names()}
    assert Muon([torch.nn.Parameter(torch.ones(8, 8))], update_rms=0.5).param_groups[0]["update_rms"] == 0.5
    optimizer = Muon([torch.nn.Parameter(torch.ones(8, 8))], **of_groups, **of_run)
    (group,) = optimizer.param_groups
    assert {name: getattr(optimizer, name) for name in of_run} == of_run
    assert {name: group[name] for name in of_groups} == of_groups


LIST = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
BETAS = tuple(np.array([0.5, 0.25]))
# Text, YAML or values of Python, and what they mean.
READ = [
    (
        "momentum=0.9, ns_steps=6,adamw_lr=1e-5,adamw_patterns=router|gate,nesterov=false,adamw_betas=0.9|0.95",
        MuonConfig(
            momentum=0.9,
            ns_steps=6,
            adamw_lr=1e-5,
            adamw_patterns="router|gate",
            nesterov=False,
            adamw_betas=(0.9, 0.95),
        ),
    ),
    (None, MuonConfig()),
    ("", MuonConfig()),
    ("ns_coefficients=1.5|-0.5|0", MuonConfig(ns_coefficients=(1.5, -0.5, 0.0))),
    ("ns_coefficients=3|-3.2|1.2|2|-1.5|0.5", MuonConfig(ns_coefficients=LIST)),
    ("ns_coefficients=3.0|-3.2|1.2|2.0|-1.5|0.5,ns_steps=2", MuonConfig(ns_coefficients=LIST, ns_steps=2)),
    (yaml.safe_load("ns_coefficients: [[3, -3.2, 1.2], [2, -1.5, 0.5]]"), MuonConfig(ns_coefficients=LIST)),
    (  # PyYAML reads 1e-5 as text
        yaml.safe_load("{momentum: 0.9, nesterov: false, adamw_betas: [0.9, 0.95], adamw_patterns: null, lr: 1e-5}"),
        MuonConfig(momentum=0.9, nesterov=False, adamw_betas=(0.9, 0.95), lr=1e-5),
    ),
    (
        {"lr": np.float32(0.5), "ns_steps": np.int64(4), "nesterov": np.bool_(False), "adamw_betas": BETAS},
        MuonConfig(lr=0.5, ns_steps=4, nesterov=False, adamw_betas=(0.5, 0.25)),
    ),
]


@pytest.mark.parametrize(("given", "expected"), READ)
def test_what_is_given_is_read_and_typed_and_written_as_text(given, expected):
    config = read(given)
    assert config == expected
    for name in OPTIONS:
        assert type(config.value_of(name)) is type(expected.value_of(name)), name
    if isinstance(given, dict):
        assert read(text_of({name: expected.value_of(name) for name in given})) == expected
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0


@given(st.lists(st.tuples(*[st.floats(-50, 50)] * 3), min_size=2, max_size=12))
def test_property_coefficients_of_each_step_as_text(triples):
    assert read(text_of({"ns_coefficients": triples})) == MuonConfig(ns_coefficients=triples)


@pytest.mark.parametrize(("value", "steps"), [("polar_express", 5), ("original", 5), (LIST, 2)], ids=str)
def test_coefficients_bring_their_number_of_steps(value, steps):
    config = MuonConfig(ns_coefficients=value)
    assert config.ns_steps == config.replace({"momentum": 0.9}).ns_steps == "auto"
    weight = nn.Parameter(torch.zeros(2, 2))
    for optimizer in (
        Muon([weight], ns_coefficients=config.ns_coefficients, ns_steps=config.ns_steps),
        Muon([{"params": [weight], "ns_coefficients": value}]),
    ):
        (group,) = optimizer.param_groups
        assert (group["ns_coefficients"], group["ns_steps"]) == (value, steps)


@given(
    momentum=st.floats(0, 0.999),
    ns_steps=st.integers(1, 99),
    muon_lr=st.floats(0, 10),
    nesterov=st.booleans(),
    adamw_betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
)
def test_property_text_is_read_as_the_values(**options):
    values = {name: "|".join(map(repr, v)) if isinstance(v, tuple) else str(v).lower() for name, v in options.items()}
    text = ",".join(f"{name}={value}" for name, value in values.items())
    assert read(text) == read(text_of(options)) == MuonConfig(**options)


# --- values and texts of any kind are taken as they are meant, or refused with a code


# Python's own messages about a wrong type, which do not help a user.
PYTHON = re.compile(
    r"object is not|has no attribute|unsupported operand|must be real|unhashable|not iterable|expected string|"
    r"NoneType|invalid literal|too large to convert|positional argument|not supported between|ambiguous"
)
VALUES = [
    *(None, True, False, 0, 1, -1, 5, 99, 100, 10**400, 10**5000, 0.5, 1.0, -0.0, 1e-300, 1e308, float("nan")),
    *(float("inf"), float("-inf"), 1j, "", " ", "0.9", "1e-5", "true", "False", "no", "nan", "inf", "-inf", "1_0", "٣"),
    *("0.9|0.95", "1|2|3", "|", "a|", "*proj", "(?i)mlp", "[", "a{99999999999}", "(" * 3000, "fp32", "bf16"),
    *("original", "all-linear", "x" * 5000, "\x00", "a,b", "a=b", "é", b"mlp", [], [1, 2], [0.9, 0.95], (0.9, 0.99)),
    *([0.9, 10**400], [1, 2, 3], [[1, 2, 3]], [[1, 2, 3], [3, 2, 1]], [[1, 2, 3], 4], [[1, 2], [3]], ["mlp"], ["*"]),
    *([None], {}, {"a": 1}, {1, 2}, object(), object, torch.float32, range(3), lambda: 0),
    *(np.float32(0.5), np.float64(0.25), np.int64(3), np.bool_(True), np.array(0.5), np.array([1, 2]), np.str_("fp32")),
    *(torch.tensor(0.5), torch.tensor(float("nan")), torch.ones(2)),
]


def outcome(make):
    """Return the result, or None after an error of ours, of which no part is Python's."""
    try:
        return make()
    except (ValueError, RuntimeError) as error:
        message = str(error)
    assert codes_in(message), message
    assert not PYTHON.search(message.partition("alid:")[0]), message
    return None


def check_right(config):
    """Check the types of all values, and that their mapping and their text give the same config."""
    values = {name: config.value_of(name) for name in OPTIONS}
    plain = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
    for name, value in plain.items():
        assert type(value) in (int, float, bool, str, tuple, type(None)) or isinstance(value, str), name
    assert MuonConfig(**plain) == MuonConfig.from_mapping(plain)
    try:
        text = text_of(plain)
    except ValueError:
        return
    assert read(text) == MuonConfig(**{n: _joined(v) for n, v in plain.items()})


def _joined(value):
    """Return a list of patterns joined as a text would write it."""
    return "|".join(value) if isinstance(value, tuple) and isinstance(value[0], str) else value


@pytest.mark.parametrize(
    "name", [*OPTIONS, "momentun", "", "LR", None, 3, ("lr",), "x" * 5000], ids=lambda n: str(n)[:9]
)
def test_any_value_of_an_option(name):
    for value in VALUES:
        config = outcome(lambda value=value: MuonConfig.from_mapping({name: value}))
        assert config is None or name in OPTIONS
        if config is not None:
            check_right(config)
        if name in OPTIONS:
            outcome(lambda value=value: MuonConfig(**{name: value}))


def test_anything_in_the_place_of_a_model_of_options_and_of_a_list_for_parameters():
    model, weight = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), nn.Parameter(torch.ones(8, 8))
    for wrong in VALUES:
        is_no_option = wrong is None or (isinstance(wrong, dict) and not wrong)
        is_list_of_one = isinstance(wrong, (list, tuple)) and len(wrong) == 1 and isinstance(wrong[0], str)
        attempts = [
            lambda wrong=wrong: build_optimizer(wrong),
            *([] if is_no_option else [lambda wrong=wrong: build_optimizer(model, wrong)]),
            *([] if isinstance(wrong, dict) else [lambda wrong=wrong: MuonConfig.from_mapping(wrong)]),
        ]
        is_unprintable = type(wrong) is int and wrong > 10**4300  # refused, in Python's words
        for key in () if wrong is None or is_list_of_one or is_unprintable else ("views", "param_names"):
            attempts.append(lambda wrong=wrong, key=key: Muon([{"params": [weight], key: wrong}]))
        assert [outcome(attempt) for attempt in attempts] == [None] * len(attempts), wrong


def mutated(*seeds):
    """Return a strategy for texts with up to four characters inserted, replaced or removed."""
    edit = st.tuples(st.integers(0, 99), st.integers(0, 1), st.sampled_from(["", *"abz019.,=|*+-_()[] x\x00é\n"]))

    def mutate(text, edits):
        for at, removed, letter in edits:
            at %= len(text) + 1
            text = text[:at] + letter + text[at + removed :]
        return text

    return st.builds(mutate, st.sampled_from(seeds), st.lists(edit, max_size=4))


OPTIM_ARGS = mutated(
    "momentum=0.9,ns_steps=6,adamw_lr=1e-5,adamw_patterns=router|gate,nesterov=false,adamw_betas=0.9|0.95",
    "lr=1e-3,ns_coefficients=3.4445|-4.775|2.0315,comm_dtype=bf16",
    "ns_coefficients=3|-3|1.2|2|-1.5|0.5,ns_steps=2,update_rms=0.18",
    "momentum_dtype=int8,max_batch_bytes=1000,per_head=true,muon_patterns=(q|k)_proj",
)


@given(OPTIM_ARGS | st.text(max_size=40))
@settings(max_examples=60)
def test_property_optim_args_and_yaml(text):
    if (config := outcome(lambda: read(text))) is not None:
        check_right(config)
    try:
        loaded = yaml.safe_load(text.replace(",", "\n").replace("=", ": "))
    except (yaml.YAMLError, ValueError):
        return
    outcome(lambda: MuonConfig.from_mapping(loaded))
    outcome(lambda: parse_optim_args(loaded))


@given(
    mutated("transposed, columns 4*(1+1)", "rows 4+2+2", "rows 2x4", "flat", "columns 2x(3+1)", "rows 99999999999x1")
)
@settings(max_examples=60)
def test_property_views(view):
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = outcome(lambda: Muon([{"params": [weight], "views": [view]}]))
    weight.grad = torch.ones(8, 8)
    if optimizer is not None:
        optimizer.step()
    assert weight.isfinite().all()
    assert (optimizer is None) is torch.equal(weight, torch.ones(8, 8))
