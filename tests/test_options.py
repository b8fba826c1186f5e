"""Thousands of mutated options, texts, views and YAML values: each is valid as written, or the error is a sentence."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from hf_muon import Muon, MuonConfig, build_optimizer
from hf_muon.config import OPTIONS
from hf_muon.optim_args import parse_optim_args, text_of

SEED, ROUNDS = 20261122, 2000
# Python's own messages about a wrong type, which do not help a user.
PYTHON = re.compile(
    r"object is not|has no attribute|unsupported operand|must be real|unhashable|not iterable|expected string|"
    r"NoneType|invalid literal|too large to convert|positional argument|not supported between|ambiguous"
)
VALUES = [
    *(None, True, False, 0, 1, -1, 5, 99, 100, 10**400, 10**5000, 0.5, 1.0, -0.0, 1e-300, 1e308, float("nan")),
    *(float("inf"), float("-inf"), 1j, "", " ", "0.9", "1e-5", "true", "False", "no", "nan", "inf", "-inf", "1_0", "٣"),
    *("0.9|0.95", "1|2|3", "|", "a|", "*proj", "(?i)mlp", "[", "a{99999999999}", "(" * 3000, "fp32", "bf16", "cans"),
    *("original", "all-linear", "x" * 5000, "\x00", "a,b", "a=b", "é", b"mlp", [], [1, 2], [0.9, 0.95], (0.9, 0.99)),
    *(
        [0.9, 10**400],
        [1, 2, 3],
        [[1, 2, 3]],
        [[1, 2, 3], [3, 2, 1]],
        [[1, 2, 3], 4],
        [[1, 2], [3]],
        ["mlp"],
        ["*"],
        [None],
        {},
        {"a": 1},
        {1, 2},
        object(),
        object,
        torch.float32,
    ),
    *(np.float32(0.5), np.float64(0.25), np.int64(3), np.bool_(True), np.array(0.5), np.array([1, 2]), np.str_("fp32")),
    *(torch.tensor(0.5), torch.tensor(float("nan")), torch.ones(2), range(3), lambda: 0),
]
CHARACTERS = "abz019.,=|*+-_()[] x\x00é\n"


def mutated(rng, text):
    letters = list(text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(letters) + 1)
        kind = rng.randrange(3)
        if kind == 0:
            letters.insert(at, rng.choice(CHARACTERS))
        elif letters:
            at = min(at, len(letters) - 1)
            letters[at] = rng.choice(CHARACTERS) if kind == 1 else ""
    return "".join(letters)


def outcome(case, make):
    """Return the result, or None after an error whose sentence names the value or the valid ones."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001
        raised = error
    message = str(raised)
    assert type(raised) in (ValueError, RuntimeError), (SEED, type(raised), message[:300])
    assert not PYTHON.search(message.partition("alid:")[0]), (SEED, case, message)
    assert len(message.split()) >= 4, (SEED, case, message)
    return None


def check_right(case, config):
    """Check the types of all values, and that their mapping and their text give the same config."""
    values = {name: config.value_of(name) for name in OPTIONS}
    plain = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
    for name, value in plain.items():
        kinds = (int, float, bool, str, tuple, type(None))
        assert type(value) in kinds or isinstance(value, str), (SEED, case, name, type(value))
    assert MuonConfig(**plain) == MuonConfig.from_mapping(plain), (SEED, case)
    try:
        text = text_of(plain)
    except ValueError:
        return
    assert MuonConfig.from_mapping(parse_optim_args(text)) == MuonConfig(**{n: _joined(v) for n, v in plain.items()})


def _joined(value):
    """Return a list of patterns joined as a text would write it."""
    return "|".join(value) if isinstance(value, tuple) and isinstance(value[0], str) else value


def test_values():
    rng = random.Random(SEED)
    names = [*OPTIONS, "momentun", "", "LR", None, 3, ("lr",), "x" * 5000]
    accepted = 0
    for name in names:
        for value in rng.sample(VALUES, len(VALUES)):
            case = {name: value}
            config = outcome(case, lambda case=case: MuonConfig.from_mapping(case))
            if config is not None:
                accepted += 1
                check_right(case, config)
            if isinstance(name, str) and name.isidentifier() and name in OPTIONS:
                outcome(case, lambda case=case: MuonConfig(**case))
    assert accepted > 100


def test_optim_args_and_yaml():
    rng = random.Random(SEED)
    seeds = [
        "momentum=0.9,ns_steps=6,adamw_lr=1e-5,adamw_patterns=router|gate,nesterov=false,adamw_betas=0.9|0.95",
        "lr=1e-3,ns_coefficients=3.4445|-4.775|2.0315,comm_dtype=bf16",
        "ns_coefficients=3|-3|1.2|2|-1.5|0.5,ns_steps=2,update_rms=0.18",
        "momentum_dtype=int8,max_batch_bytes=1000,per_head=true,muon_patterns=(q|k)_proj",
    ]
    for _ in range(ROUNDS):
        text = mutated(rng, rng.choice(seeds))
        config = outcome(text, lambda text=text: MuonConfig.from_mapping(parse_optim_args(text)))
        if config is not None:
            check_right(text, config)
        lines = text.replace(",", "\n").replace("=", ": ")
        try:
            loaded = yaml.safe_load(lines)
        except (yaml.YAMLError, ValueError):
            continue
        outcome(lines, lambda loaded=loaded: MuonConfig.from_mapping(loaded))
        outcome(lines, lambda loaded=loaded: parse_optim_args(loaded))


def test_views():
    rng = random.Random(SEED)
    seeds = ["transposed, columns 4*(1+1)", "rows 4+2+2", "rows 2x4", "flat", "columns 2x(3+1)", "rows 99999999999x1"]
    weight = nn.Parameter(torch.randn(8, 8))
    before = weight.detach().clone()
    for _ in range(ROUNDS):
        view = mutated(rng, rng.choice(seeds))
        optimizer = outcome(view, lambda view=view: Muon([{"params": [weight], "views": [view]}]))
        if optimizer is not None:
            weight.grad = torch.ones(8, 8)
            optimizer.step()
            assert weight.isfinite().all(), (SEED, view)
            weight.data.copy_(before)
    for key in ("views", "param_names"):
        for wrong in VALUES:
            if wrong is None or (isinstance(wrong, (list, tuple)) and len(wrong) == 1 and isinstance(wrong[0], str)):
                continue
            assert outcome((key, wrong), lambda wrong=wrong, key=key: Muon([{"params": [weight], key: wrong}])) is None
    assert torch.equal(weight, before)


def test_wrong_things_for_build_optimizer():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    for wrong in VALUES:
        assert outcome(wrong, lambda wrong=wrong: build_optimizer(wrong)) is None
        if not (wrong is None or (isinstance(wrong, dict) and not wrong)):
            assert outcome(wrong, lambda wrong=wrong: build_optimizer(model, wrong)) is None
        if not isinstance(wrong, dict):
            assert outcome(wrong, lambda wrong=wrong: MuonConfig.from_mapping(wrong)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adamw_patterns": "*proj"}, r"adamw_patterns='\*proj' is not valid: .* is not a regular expression"),
        ({"lr": 10**400}, r"lr=1000.*\.\.\. is not valid. Valid: a number of at least 0"),
        ({"lr": 10**5000}, "lr=<int> is not valid. Valid: a number of at least 0"),
        ({None: 1}, "None is not an option of muon. Valid: lr"),
        (3, "options of muon are a mapping of names to values, not 3"),
    ],
)
def test_sentences(options, message):
    with pytest.raises(ValueError, match=message):
        MuonConfig.from_mapping(options)


def test_scalars_of_numpy():
    options = {
        "lr": np.float32(0.5),
        "ns_steps": np.int64(4),
        "nesterov": np.bool_(False),
        "adamw_betas": np.array([0.5, 0.25]),
    }
    options["adamw_betas"] = tuple(options["adamw_betas"])
    config = MuonConfig(**options)
    assert config == MuonConfig(lr=0.5, ns_steps=4, nesterov=False, adamw_betas=(0.5, 0.25))
    assert [type(v) for v in (config.lr, config.ns_steps, config.nesterov)] == [float, int, bool]


def test_optim_args_as_a_mapping():
    options = yaml.safe_load(
        "{momentum: 0.9, nesterov: false, adamw_betas: [0.9, 0.95], adamw_patterns: null, lr: 1e-5}"
    )
    config = MuonConfig.from_mapping(parse_optim_args(options))
    assert config == MuonConfig(momentum=0.9, nesterov=False, adamw_betas=(0.9, 0.95), lr=1e-5)
    assert MuonConfig.from_mapping(parse_optim_args(text_of(options))) == config
    with pytest.raises(ValueError, match=r"'momentun' is not an option of muon. Did you mean 'momentum'"):
        parse_optim_args({"momentun": 0.9})
    with pytest.raises(ValueError, match="holds a blank, a comma or an equals sign"):
        text_of({"adamw_patterns": ["a, b"]})
