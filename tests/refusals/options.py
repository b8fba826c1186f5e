"""Options of Muon, from Python and as text, and patterns of names."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from hf_muon import MuonConfig, build_optimizer, route_parameters
from hf_muon.optim_args import parse_optim_args, text_of
from tests.refusals import Refusal
from tests.routing.models import qwen3

# A text, its code, and what the user needs to see in the error.
OPTIM_ARGS = [
    ("moment=0.9", "unknown-option", "'moment'.*'momentum'.*: lr, weight_decay, muon_lr"),
    ("momentum", "not-name-value", "'momentum'.*: lr"),
    ("momentum=", "not-name-value", "'momentum='"),
    ("=3", "not-name-value", "'=3'"),
    ("momentum=0.9,", "not-name-value", "''"),
    ("adamw_patterns=a=b", "not-name-value", "'adamw_patterns=a=b'"),
    ("momentum=0.9,momentum=0.8", "given-twice", "momentum .*'0.9'.*'0.8'"),
    ("momentum=high", "invalid-value", "momentum=high.*from 0 to below 1"),
    ("momentum=1.5", "invalid-value", r"momentum=1\.5.*from 0 to below 1"),
    ("ns_steps=5.5", "invalid-value", r"ns_steps=5\.5.*auto.*from 1 to 99"),
    ("ns_steps=0", "invalid-value", "ns_steps=0"),
    ("nesterov=maybe", "invalid-value", "nesterov=maybe.*true.*false"),
    ("adamw_betas=0.9", "invalid-value", r"adamw_betas=.*written 0\.9\|0\.95"),
    ("lr=-1", "invalid-value", r"lr=-1\.0.*at least 0"),
    ("lr=inf", "invalid-value", "lr=inf"),
    ("adamw_lr=nan", "invalid-value", "adamw_lr=nan"),
    ("ns_coefficients=quintic", "invalid-value", "'quintic'.*polar_express, original"),
    ("ns_coefficients=1|2|3|4", "invalid-value", "ns_coefficients=.*polar_express"),
    ("ns_coefficients=1|2|3|4|5|6,ns_steps=3", "ns-steps-misfit", "ns_steps=3.* 2 "),
    ("update_rms=0", "invalid-value", r"update_rms=0\.0.*above 0"),
    ("update_rms=0.3,adjust_lr_fn=original", "unused-update-rms", r"update_rms=0\.3.*match_rms_adamw"),
    ("ns_dtype=float32", "invalid-value", "'float32'.*auto, bf16, fp16 or fp32"),
    ("adjust_lr_fn=none", "invalid-value", "match_rms_adamw, original or spectral_unclamped"),
    ("lora=yes", "invalid-value", "'yes'.*adamw or muon"),
]
# Options in Python.
OPTIONS: list[tuple[Any, str, str]] = [
    ({"momentun": 0.9}, "unknown-option", "'momentun'.*'momentum'"),
    ({None: 1}, "unknown-option", "None .*: lr"),
    (3, "not-a-mapping", "not 3"),
    ({"lr": 10**400}, "invalid-value", r"lr=1000.*\.\.\..*at least 0"),
    ({"lr": 10**5000}, "invalid-value", "lr=<int>"),
    ({"max_batch_bytes": 10**5000}, "invalid-value", "max_batch_bytes=<int>"),
    ({"adamw_patterns": "*proj"}, "invalid-value", r"adamw_patterns='\*proj'"),
    ({"ns_coefficients": [(3.0, -3.2, 1.2)]}, "invalid-value", "ns_steps: 1"),
]
# Options of routing, of a Qwen3 that has no adapters.
ROUTING: list[tuple[dict[str, Any], str, str]] = [
    ({"adamw_patterns": "router|gate"}, "matches-nothing", "adamw_patterns: 'router' .* model"),
    ({"muon_patterns": "k_proj|nothing"}, "matches-nothing", "muon_patterns: 'nothing'"),
    ({"adamw_patterns": "(z|y)_proj|q_proj"}, "matches-nothing", r"'\(z\|y\)_proj'"),
    ({"muon_patterns": "norm"}, "matches-nothing", r"muon_patterns: 'norm' .*model\.layers\.0"),
    ({"lora": "muon"}, "no-lora-factors", "lora=muon: no LoRA "),
    ({"adamw_patterns": "(q|z"}, "invalid-value", r"'\(q\|z'"),
    ({"adamw_patterns": "q_proj||k_proj"}, "invalid-value", r"'q_proj\|\|k_proj'"),
]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))


def with_frozen_head() -> SimpleNamespace:
    given = qwen3()
    given.lm_head.requires_grad_(False)
    return SimpleNamespace(model=given)


def factors(**others: nn.Module) -> nn.Module:
    own = {"lora_A": nn.Linear(8, 4, bias=False), "lora_B": nn.Linear(4, 8, bias=False)}
    return nn.ModuleDict({**own, **others})


# Models of which nothing reaches Muon.
WITHOUT_MATRICES: list[tuple[Any, str, str]] = [
    (lambda: nn.Sequential(nn.LayerNorm(4)), "nothing-for-muon", "Sequential .*: 1 x norm; 1 x bias"),
    (lambda: model().requires_grad_(False), "nothing-for-muon", "Sequential "),
    (factors, "lora-without-muon", "Only LoRA .*lora=muon"),
    (lambda: factors(embed=nn.Embedding(8, 4)), "lora-without-muon", " 1 other .*lora=muon"),
]


def read(text: str) -> MuonConfig:
    return MuonConfig.from_mapping(parse_optim_args(text))


def build_optimizer_of(given: nn.Module) -> None:
    build_optimizer(given)


CASES = [
    *(Refusal(code, "optim_args", partial(read, text), says=says, name=text) for text, code, says in OPTIM_ARGS),
    *(
        Refusal(code, "MuonConfig", partial(MuonConfig.from_mapping, options), says=says)
        for options, code, says in OPTIONS
    ),
    *(
        Refusal(code, "route_parameters", lambda given, o=options: route_parameters(given, **o), given=qwen3, says=says)
        for options, code, says in ROUTING
    ),
    Refusal(
        "matches-nothing",
        "route_parameters",
        lambda given: route_parameters(given.model, adamw_patterns="lm_head"),
        given=with_frozen_head,
        says="'lm_head' .* lm_head",
        name="frozen",
    ),
    Refusal("invalid-value", "optim_args", lambda: parse_optim_args(3), says="optim_args=3"),
    Refusal("unknown-option", "optim_args", lambda: parse_optim_args({"momentun": 0.9}), says="'momentum'"),
    Refusal("unwritable-value", "optim_args", lambda: text_of({"adamw_patterns": ["a, b"]}), says="adamw_patterns="),
    Refusal(
        "unknown-option",
        "build_optimizer",
        lambda given: build_optimizer(given, momentun=0.9),
        given=model,
        says="'momentun'.*'momentum'.*: lr",
    ),
    *(
        Refusal(code, "build_optimizer", build_optimizer_of, given=given, says=says)
        for given, code, says in WITHOUT_MATRICES
    ),
    Refusal("not-a-mapping", "build_optimizer", lambda given: build_optimizer(given, 3), given=model, says="not 3"),
    Refusal(
        "not-a-module",
        "build_optimizer",
        lambda given: build_optimizer(list(given.parameters()), lr=0.1),
        given=model,
        says=r"hf_muon\.MuonOfGroups",
    ),
]
