"""Other Muons to convert from, and a short way to call the conversion."""

from __future__ import annotations

import io

import torch
from torch import nn

from hf_muon import build_optimizer
from hf_muon.convert.conversion import convert_state_dict
from tests.other_muons import Model, gradients, jordan_2024, jordan_2025, moonlight_like, run

BEFORE, AFTER = 4, 5
MOONLIGHT_RULE = {"adjust_lr_fn": "match_rms_adamw", "adamw_betas": (0.9, 0.95)}
JORDAN_RULE = {"adjust_lr_fn": "original", "adamw_betas": (0.9, 0.95)}
IN_ORDER = {"in_model_order": True}

# Each other Muon: its format, its constructor, our options for its rule, and arguments that the conversion needs.
OTHERS = {
    "llamafactory-v0": ("llamafactory-v0", moonlight_like, MOONLIGHT_RULE, {}),
    "llamafactory-v1": ("llamafactory-v1", lambda m: moonlight_like(m, "llamafactory-v1"), MOONLIGHT_RULE, {}),
    "moonlight": ("moonlight", lambda m: moonlight_like(m, "moonlight"), MOONLIGHT_RULE, {}),
    "jordan 2024": ("keller-jordan", jordan_2024, JORDAN_RULE, IN_ORDER),
    "jordan 2025": ("keller-jordan", jordan_2025, JORDAN_RULE, IN_ORDER),
    "jordan, copied": (
        "keller-jordan",
        lambda m: jordan_2025(m, form="sgd", nesterov=True),
        JORDAN_RULE,
        {**IN_ORDER, "momentum_form": "sgd"},
    ),
}


def ours(model, **options):
    rule = {"lr": 0.02, "ns_coefficients": "original", "ns_dtype": "fp32", "adamw_eps": 1e-8}
    return build_optimizer(model, **{**rule, **options})


def saved(optimizer):
    """Return an optimizer's state after a round trip through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(make, steps=BEFORE, model=None):
    model = model or Model()
    optimizer = make(model)
    run(model, gradients(model, steps), optimizer)
    return model, optimizer


def convert(optimizer, model, source="llamafactory-v0", target=None, **arguments):
    state_dict = optimizer if isinstance(optimizer, dict) else saved(optimizer)
    return convert_state_dict(state_dict, model, target or ours(model), source, **arguments)


def with_word_embeddings():
    """Return a model with a matrix that llamafactory-v0 steps with Muon and llamafactory-v1 with AdamW."""
    model = Model()
    model.wte = nn.Embedding(30, 16)
    return model
