"""A weight that a module computes from others keeps the route of the plain weight, or goes to AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from hf_muon import route_parameters
from tests.routing.models import linear, module


class Own(nn.Module):
    """A parametrization with these functions."""

    def __init__(self, forward, right_inverse=None, **parameters):
        super().__init__()
        self.forward = forward
        if right_inverse is not None:
            self.right_inverse = right_inverse
        for name, parameter in parameters.items():
            setattr(self, name, nn.Parameter(parameter))


def registered(*parametrization, unsafe=False):
    return lambda layer: parametrize.register_parametrization(layer, "weight", Own(*parametrization), unsafe=unsafe)


WAYS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "of one's own": registered(lambda weight: weight.tanh()),
    "two": lambda layer: registered(lambda weight: weight * 2)(parametrizations.spectral_norm(layer)),
    "older weight norm": nn.utils.weight_norm,
    "older spectral norm": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}
LAYERS = ["tok", "conv", "depthwise", "back", "hidden.0", "hidden.1.0", "attn.c_attn", "attn.c_proj", "lm_head"]


def model():
    torch.manual_seed(0)
    return module(
        tok=nn.Embedding(50, 16),
        conv=nn.Conv2d(6, 8, 3, groups=2),
        depthwise=nn.Conv1d(6, 6, 3, groups=6),
        back=nn.ConvTranspose1d(6, 9, 3, groups=3),
        hidden=nn.ModuleList([linear(16, 16), nn.Sequential(linear(16, 16))]),
        attn=GPT2Attention(GPT2Config(n_embd=16, n_head=2)),
        lm_head=linear(50, 16),
    )


def routes_under(own, name):
    """Return route, view and reason of the matrices below a name, by the shape of the parameter."""
    return {
        route.shape: (route.use_muon, route.view, route.reason)
        for route in route_parameters(own)
        if route.name.startswith(f"{name}.") and "bias" not in route.name
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_weight_keeps_its_route_and_view(way, layer):
    plain = routes_under(model(), layer)
    own = model()
    WAYS[way](own.get_submodule(layer))
    found = routes_under(own, layer)
    assert plain.items() <= found.items()
    assert not any(use_muon for shape, (use_muon, _, _) in found.items() if shape not in plain)


def low_rank(rank):
    return registered(lambda a, b: a @ b, lambda weight: (weight[:, :rank].clone(), weight[:rank].clone()))


PART = "part of a weight (muon_patterns opts in)"


@pytest.mark.parametrize(
    "change",
    [
        low_rank(3),
        registered(lambda a: a @ a.mT, lambda weight: weight[:, :3].clone()),
        registered(lambda a, b: a + b, lambda weight: (weight / 2, weight / 2)),
    ],
    ids=["low rank", "square of a factor", "sum"],
)
def test_tensors_that_are_not_the_weight_go_to_adamw(change):
    own = module(hidden=nn.ModuleList([linear(16, 16), linear(16, 16)]))
    change(own.hidden[0])
    reasons = {route.reason for route in route_parameters(own) if route.name.startswith("hidden.0")}
    assert reasons == {PART}


def test_parameters_of_a_parametrization_go_to_adamw_and_its_frozen_weight_stays_frozen():
    own = module(hidden=nn.ModuleList([linear(16, 16), linear(16, 16)]))
    own.hidden[0].weight.requires_grad_(False)
    parametrization = Own(lambda weight: weight, a=torch.zeros(16, 3), lora_b=torch.zeros(3, 16))
    parametrize.register_parametrization(own.hidden[0], "weight", parametrization)
    own.hidden[0].parametrizations.weight.original.requires_grad_(False)
    found = {route.name: route.reason for route in route_parameters(own) if "hidden.0" in route.name}
    assert found == {
        "hidden.0.parametrizations.weight.0.a": PART,
        "hidden.0.parametrizations.weight.0.lora_b": "name contains 'lora' (lora=muon opts in)",
    }


def test_pruned_entries_stay_zero_under_muon():
    import hf_muon

    own = nn.Sequential(linear(8, 8), linear(8, 8))
    prune.l1_unstructured(own[0], "weight", 0.3)
    optimizer = hf_muon.build_optimizer(own, lr=1e-2, muon_patterns="weight")
    for _ in range(2):
        own(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
    own(torch.ones(4, 8))
    assert not own[0].weight[own[0].weight_mask == 0].any()


def test_a_layer_with_running_means_and_one_with_a_tensor_of_a_like_name_keep_their_matrices():
    centering, other = nn.Linear(16, 16), nn.Module()
    centering.register_buffer("running_mean", torch.zeros(16))
    other.proj_in, other.proj = nn.Parameter(torch.ones(16, 16)), torch.ones(16)
    routes = route_parameters(nn.ModuleDict({"centering": centering, "other": other}))
    assert {route.name for route in routes if route.use_muon} == {"centering.weight", "other.proj_in"}
