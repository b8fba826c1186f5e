"""States that the conversion refuses, and the text of the error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.convert import FORMATS, convert_state_dict
from tests.convert.sources import OTHERS, convert, names_of, ours, saved, trained
from tests.other_muons import Model, deepspeed_like, halves, moonlight_like


def refused(message, optimizer=None, model=None, source="llamafactory-v0", edit=None, target=None, **arguments):
    """Expect an error, and a target that has not changed."""
    if optimizer is None:
        model, optimizer = trained(moonlight_like)
    state_dict = optimizer if isinstance(optimizer, dict) else saved(optimizer)
    if edit:
        edit(state_dict)
    target = target or ours(model)
    with pytest.raises(ValueError, match=message):
        convert_state_dict(state_dict, model, target, source, **arguments)
    assert not target.state


def test_an_unknown_format():
    refused(f"'moonlit' is not a format. Valid: {', '.join(FORMATS)}", source="moonlit")


@pytest.mark.parametrize("state_dict", [{"model": 1}, [1], {"param_groups": 3, "state": {}}])
@pytest.mark.parametrize("source", ["torch", "deepspeed"])
def test_not_an_optimizer(state_dict, source):
    with pytest.raises(ValueError, match=r"no optimizer's state_dict.*ZeRO's files of DeepSpeed hold slices"):
        convert_state_dict(state_dict, Model(), ours(Model()), source)


@pytest.mark.parametrize("source", ["torch", "deepspeed"])
def test_another_format(source):
    refused(r"param groups hold .*'wd'\], which are not those of that optimizer", source=source)


@pytest.mark.parametrize("source", FORMATS)
def test_hf_muons_own(source):
    model, optimizer = trained(ours)
    refused("it is hf_muon's own already", optimizer, model, source)


def change(position, **values):
    """Return what changes the state of the parameter at a position; None removes a key."""

    def edit(state_dict):
        state = state_dict["state"][position]
        state.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del state[key]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(0, momentum_buffer=None, momentum=torch.ones(16, 16)), r"layers.0.q_proj|parameter 0 .*\['momentum'\]"),
        (change(0, use_muon=False), r"parameter 0 of group 0: its state holds \['momentum_buffer'\]"),
        (change(-1, step=None), r"its state holds \['moment1', 'moment2'\]"),
        (
            change(0, momentum_buffer=torch.ones(3, 4)),
            r"q_proj.weight \(16, 16\): its momentum_buffer has shape \(3, 4\)",
        ),
        (lambda state: state["state"].pop(3), "no moments in the source"),
        (lambda state: state["param_groups"][0].pop("momentum"), "has no momentum from 0 to below 1"),
        (lambda state: state["param_groups"][0].update(momentum=1.5), "has no momentum from 0 to below 1"),
    ],
    ids=["other key", "other flag", "no step", "other shape", "none", "no momentum", "momentum 1.5"],
)
def test_states_that_are_not_whole(edit, message):
    model, optimizer = trained(moonlight_like)

    def at_end(state_dict):
        state_dict["state"][-1] = state_dict["state"].get(len(state_dict["state"]) - 1, {})
        edit(state_dict)

    refused(message, optimizer, model, edit=at_end)


def test_another_model_or_another_choice_of_what_is_trained():
    model, optimizer = trained(moonlight_like)
    model.layers[2].requires_grad_(False)
    refused("18 names for a state of 25 parameters do not fit it: each parameter has one name", optimizer, model)


def test_a_state_without_names_of_groups_that_its_user_makes():
    model, optimizer = trained(deepspeed_like)
    refused("holds no names, and the user of that optimizer makes its groups", optimizer, model, "deepspeed")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda names: names[1:], "24 names for a state of 25 parameters do not fit it"),
        (lambda names: ["layer.0.q_proj.weight", *names[1:]], "layer.0.q_proj.weight are not trained in this model"),
        (lambda names: [names[1], *names[1:]], "each parameter has one name"),
        (lambda names: [names[-1], *names[1:-1], names[0]], "AdamW here|AdamW there"),
    ],
)
def test_names(edit, message):
    model, optimizer = trained(deepspeed_like)
    refused(message, optimizer, model, "deepspeed", names=edit(names_of(model, optimizer)))


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_parameters(name):
    """Convert to a model with one matrix more: nothing is left to a guess."""
    source, make, _ = OTHERS[name]
    model, optimizer = trained(make)
    larger = Model()
    larger.layers.append(nn.Linear(16, 16, bias=False))
    with pytest.raises(ValueError, match=r"names for a state of 25|layers\.3\.weight: no moments"):
        convert(optimizer, larger, source, ours(larger), model)


def test_an_optimizer_without_names():
    model, optimizer = trained(moonlight_like)
    refused("Make it with build_optimizer", optimizer, model, target=Muon(halves(model)[0]))


def test_moments_of_the_models_wrapper_keep_their_names():
    """Read a state keyed by the names of a model that was wrapped by DistributedDataParallel."""
    model, optimizer = trained(moonlight_like)
    names = dict(enumerate(names_of(model, optimizer)))
    state = saved(optimizer)
    state["state"] = {f"module.{names[key]}": value for key, value in state["state"].items()}
    state["param_groups"][0]["params"] = [f"module.{name}" for name in reversed(names.values())]
    target = ours(model)
    target.load_state_dict(convert(state, model, target=target))
    for name, p in model.named_parameters():
        buffer = optimizer.state[p].get("momentum_buffer")
        assert buffer is None or torch.equal(target.state[p]["momentum_buffer"], buffer * (1 - 0.95)), name
