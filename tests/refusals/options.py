"""Options of Muon, from Python and as text, and what is not a model."""

from __future__ import annotations

import torch
from torch import nn

from hf_muon import Muon, MuonConfig, build_optimizer
from hf_muon.optim_args import parse_optim_args
from tests.refusals import Refusal


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))


def optimizer() -> Muon:
    (weight,) = made = [nn.Parameter(torch.ones(4, 3))]
    weight.grad = torch.ones(4, 3)
    return Muon(made, lr=0.1)


CASES = [
    Refusal(
        "unknown-option",
        "build_optimizer",
        lambda given: build_optimizer(given, momentun=0.9),
        given=model,
        says="'momentun'.*'momentum'.*: lr",
    ),
    Refusal("invalid-value", "MuonConfig", lambda: MuonConfig(momentum=1.5), says=r"momentum=1\.5.*from 0 to below 1"),
    Refusal("given-twice", "optim_args", lambda: parse_optim_args("momentum=0.9,momentum=0.8"), says="'0.9'.*'0.8'"),
]
