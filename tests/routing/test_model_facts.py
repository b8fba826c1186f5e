"""Numbers of experts, under each name that models give them: one list serves routes and plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_muon import route_parameters
from hf_muon.plan.activations import model_flops
from hf_muon.routing.model_facts import expert_counts

NAMES = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts")


class Layer(nn.Module):
    """Four matrices in one tensor, under a name that says nothing about experts."""

    def __init__(self, **counts):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4, 8, 12))
        for name, count in counts.items():
            setattr(self, name, count)


def test_counts_are_integers_with_the_usual_name_first():
    owner = SimpleNamespace(n_experts=6, num_experts=4, num_local_experts=None, n_routed_experts="5", experts=3)
    assert expert_counts(owner) == [4, 6]
    assert expert_counts(SimpleNamespace()) == expert_counts(None) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_module_with_as_many_experts_holds_a_stack(name):
    assert [route.use_muon for route in route_parameters(Layer(**{name: 4}))] == [True]
    assert [route.use_muon for route in route_parameters(Layer(**{name: 3}))] == [False]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_the_experts_of_a_token(name):
    model = nn.ModuleDict({"experts": Layer()})
    model.config = SimpleNamespace(**{name: 4, "num_experts_per_tok": 2})
    assert model_flops(model) == 6 * 2 * 8 * 12
    model.config = SimpleNamespace()
    assert model_flops(model) == 6 * 4 * 8 * 12
