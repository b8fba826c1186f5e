"""Whole states that lack some of their moments, loaded as torch does it: into the state that the optimizer has."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.distributed.state_dict_cases import differences, muon, pair, train, whole_tensors


def without(state, names, flatten):
    """Remove moments (`two.down.weight momentum_buffer`), parameters' states or a key of groups (`groups step`)."""
    for name in names:
        param, _, key = name.partition(" ")
        if param == "groups":
            for group in [state] if flatten else state["param_groups"]:
                for own in [own for own in group if own == key or own.endswith(f".{key}")]:
                    if not own.startswith("state."):
                        del group[own]
        elif flatten:
            prefix = f"state.{param}." + key
            for own in [own for own in state if own.startswith(prefix)]:
                del state[own]
        elif key:
            del state["state"][param][key]
        else:
            del state["state"][param]


def load_without(rank, layout, names, flatten=False, broadcast=False, steps=0, strict=True, tensor_lr=False):
    """Return the error of a load, or None, and the state that the optimizer has then.

    Args:
        rank: of this process.
        layout: of the model.
        names: what to remove from the state.
        flatten: whether the state is flattened.
        broadcast: whether rank 0 alone has it.
        steps: number of steps that the optimizer has taken before the load.
        strict: of torch's options.
        tensor_lr: whether learning rates are tensors, with which torch loads the options of groups one by one.
    """
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flatten)
    _, _, other, its = pair(layout)
    fresh = muon(other)
    if tensor_lr:
        for group in its.param_groups + fresh.param_groups:
            group["lr"] = torch.tensor(1e-2)
    train(other, its)
    expected = whole_tensors(its.state_dict())
    state = get_optimizer_state_dict(other, its, options=options)
    without(state, names, flatten)
    if steps:
        train(other, fresh, steps, seed=7)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
    try:
        set_optimizer_state_dict(other, fresh, {} if broadcast and rank else state, options=options)
    except (RuntimeError, ValueError, AssertionError, KeyError) as error:
        return f"{type(error).__name__}: {error}", None
    return None, (expected, whole_tensors(fresh.state_dict()))


def load_after_freezing(rank, full, broadcast):
    """Return the differences of a state from the saved one, if a parameter was frozen before the load, and its flag."""
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast)
    _, _, other, its = pair("fsdp")
    fresh = muon(other)
    train(other, its)
    expected = whole_tensors(its.state_dict())
    state = get_optimizer_state_dict(other, its, options=StateDictOptions(full_state_dict=full))
    other.two.down.weight.requires_grad_(False)
    set_optimizer_state_dict(other, fresh, {} if broadcast and rank else state, options=options)
    flags = other.two.down.weight.requires_grad, other.two.up.weight.requires_grad
    return differences(expected, whole_tensors(fresh.state_dict()), torch.equal), flags


def load_before_the_first_step(rank, broadcast):
    """Return the differences from an optimizer that loads nothing, after training, of one that loads an empty state."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    results = []
    for loads in (False, True):
        _, _, other, its = pair("fsdp")
        if loads:
            groups = get_optimizer_state_dict(other, muon(other), options=options)["param_groups"]
            state = {} if broadcast and rank else {"state": {}, "param_groups": groups}
            set_optimizer_state_dict(other, its, state, options=options)
        train(other, its)
        results.append(whole_tensors(its.state_dict()))
    return differences(*results, torch.equal)
