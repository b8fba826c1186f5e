"""Other Muons to convert from, and a short way to call the conversion."""

from __future__ import annotations

import io

import torch
from torch import nn

from hf_muon import build_optimizer
from hf_muon.convert import convert_state_dict
from tests.support.other_muons import Model, deepspeed_like, gradients, moonlight_like, run

BEFORE, AFTER = 4, 5
MOONLIGHT_RULE = {"adjust_lr_fn": "match_rms_adamw", "adamw_betas": (0.9, 0.95)}
JORDAN_RULE = {"adjust_lr_fn": "original", "adamw_betas": (0.9, 0.95)}

# Each other Muon: its format, its constructor, and our options for its rule.
OTHERS = {
    "llamafactory-v0": ("llamafactory-v0", moonlight_like, MOONLIGHT_RULE),
    "llamafactory-v1": ("llamafactory-v1", lambda m: moonlight_like(m, "llamafactory-v1"), MOONLIGHT_RULE),
    "deepspeed": ("deepspeed", deepspeed_like, JORDAN_RULE),
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


def names_of(model, *optimizers):
    """Return the names of the parameters in the order of the optimizers' states."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def convert(optimizer, model, source="llamafactory-v0", target=None, theirs=None, **arguments):
    """Convert a state; names for those without an order of their own are read from an optimizer over `theirs`."""
    if source == "deepspeed" and theirs is not None:
        arguments = {"names": names_of(theirs, optimizer), **arguments}
    state_dict = optimizer if isinstance(optimizer, dict) else saved(optimizer)
    return convert_state_dict(state_dict, model, target or ours(model), source, **arguments)


def with_word_embeddings():
    """Return a model with a matrix that llamafactory-v0 steps with Muon and llamafactory-v1 with AdamW."""
    model = Model()
    model.wte = nn.Embedding(30, 16)
    return model
