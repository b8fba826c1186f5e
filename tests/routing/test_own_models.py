"""Heads of models of people's own, which no configuration names, and hidden matrices that look like them."""

from __future__ import annotations

import pytest
from torch import nn

from hf_muon import route_parameters
from hf_muon.routing.route import table
from hf_muon.routing.router import GUESS
from tests.support.own_models import OWN, build


@pytest.mark.parametrize("name", OWN)
def test_heads_and_no_other_matrices_go_to_adamw(name):
    """Compare with the names that the model's author would give; embeddings and what is no matrix go there, too."""
    model, own = build(name), OWN[name]
    tables = {f"{at}.weight" for at, module in model.named_modules() if isinstance(module, nn.Embedding)}
    matrices = {name for name, param in model.named_parameters() if param.ndim > 1}
    to_adamw = {route.name for route in route_parameters(model) if not route.use_muon and route.name in matrices}
    names = {name for head in own.heads for name in (head, f"{head}.weight") if name in matrices}
    assert to_adamw - tables == names
    assert sum(route.reason.startswith(GUESS) for route in route_parameters(model)) == own.guesses


def test_routes_are_the_committed_ones(golden):
    golden("routes/own_models", "\n\n".join(f"{name}\n{table(route_parameters(build(name)))}" for name in OWN))
