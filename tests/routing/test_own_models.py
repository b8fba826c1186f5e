"""Heads of models of people's own, which no configuration names, and hidden matrices that look like them."""

from __future__ import annotations

import re

import pytest
from torch import nn

from hf_muon import build_optimizer, route_parameters
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
    golden("own_models", "\n\n".join(f"{name}\n{table(route_parameters(build(name)))}" for name in OWN))


@pytest.mark.parametrize("name", [name for name in OWN if OWN[name].guesses])
def test_a_guess_is_named_once_with_the_line_that_settles_it(name, caplog):
    """Take the line at its word, both ways: what it names is then no guess, and goes where the pattern says."""
    model = build(name)
    build_optimizer(model)
    (line,) = [line for line in caplog.text.splitlines() if line.startswith("a guess")]
    (guess,) = [route for route in route_parameters(model) if f" {route.name}" in line][:1]
    change, confirm = re.search(r"write (\w+)=\S+ .*; (\w+) confirms", line).groups()
    pattern = re.search(r"=(\S+)", line).group(1)
    for option, use_muon in ((change, not guess.use_muon), (confirm, guess.use_muon)):
        routes = {route.name: route for route in route_parameters(model, **{option: pattern})}
        assert routes[guess.name].use_muon is use_muon
        assert sum(GUESS in route.reason for route in routes.values()) == OWN[name].guesses - 1
