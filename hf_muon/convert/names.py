"""Which parameter is which in a state that may hold no names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_muon.convert.formats import HALF, Slot, known, refuse
from hf_muon.diagnostics.log import first_few
from hf_muon.optimizer.muon import Muon

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def names_of(
    slots: Sequence[Slot],
    model: nn.Module,
    optimizer: Muon,
    source: str,
    names: Sequence[str] | None,
    in_model_order: bool,
) -> list[str]:
    """A name of the model's for each slot: as given, as the state holds it, or by the order that the source keeps.

    Raises:
        ValueError: what fits no parameter, or more than one.
    """
    params = _parameters(model, optimizer)
    if names is None and all(slot.name for slot in slots):
        names = [_plain(str(slot.name), params) for slot in slots]
    if names is not None:
        _check_names(names, slots, params)
        return list(names)
    if in_model_order:
        return _names_by_shape(slots, params, source)
    if known(source).not_muon is not None:
        return _names_by_rule(slots, params, source)
    raise ValueError(
        f"This state of {source} holds no names, and the user of that optimizer makes its groups. If each group lists "
        "its parameters in the order of model.named_parameters(), say in_model_order; if not (the head before the "
        "embeddings, for one), give names, in the order of the state"
    )


def _parameters(model: nn.Module, optimizer: Muon) -> dict[str, nn.Parameter]:
    """The model's parameters in its order, by the names that the optimizer has for them."""
    if not all(group.get("param_names") for group in optimizer.param_groups):
        raise ValueError("The optimizer's param groups hold no names. Make it with build_optimizer(model)")
    ours = {
        id(param): name
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }
    params = {ours.get(id(param), name): param for name, param in model.named_parameters()}
    if strange := [name for name in ours.values() if name not in params]:
        raise ValueError(f"The optimizer is not over this {type(model).__name__}, which lacks {first_few(strange)}")
    return params


def _plain(name: str, params: Mapping[str, Any]) -> str:
    return name if name in params else ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _check_names(names: Sequence[str], slots: Sequence[Slot], params: Mapping[str, Any]) -> None:
    if len(names) != len(slots):
        raise ValueError(f"names: {len(names)} names for a state of {len(slots)} parameters")
    for i, name in enumerate(names):
        if name not in params:
            near = difflib.get_close_matches(name, params, n=1)
            raise ValueError(f"names: the model has no {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        if name in names[:i]:
            raise ValueError(f"names: {name!r} stands there twice")


def _names_by_rule(slots: Sequence[Slot], params: Mapping[str, nn.Parameter], source: str) -> list[str]:
    """In the format's own order, which the number of parameters and their halves have to fit; so do shapes, later."""
    form = known(source)
    words = form.not_muon or ()
    listed = {name: param for name, param in params.items() if param.requires_grad or form.lists_frozen}
    to_muon = {name: param.ndim == 2 and not any(w in name for w in words) for name, param in listed.items()}
    order = sorted(listed, key=lambda name: not to_muon[name])
    complaints = [
        f"{slot.label} was stepped by {HALF[slot.use_muon]}, where {source} has {name} for {HALF[to_muon[name]]}"
        for name, slot in zip(order, slots, strict=False)
        if slot.use_muon != to_muon[name]
    ]
    if len(order) != len(slots):
        complaints = [f"it has {len(slots)} parameters, and {source} lists {len(order)} of this model's {len(params)}"]
    if complaints:
        complaints.append("another model, choice of what is trained, or rule wrote it; names, in its order, settle it")
    refuse(source, complaints)
    return order


def _names_by_shape(slots: Sequence[Slot], params: Mapping[str, nn.Parameter], source: str) -> list[str]:
    """In the model's order within groups: what has one shape can be told apart if one half of one group has all."""
    here: dict[tuple[int, ...], list[str]] = {}
    for name, param in params.items():
        if param.requires_grad:
            here.setdefault(as_matrix(param.shape), []).append(name)
    there: dict[tuple[int, ...], list[int]] = {}
    complaints = []
    for i, slot in enumerate(slots):
        if slot.shape is None:
            complaints.append(f"{slot.label} has no moments, and so no shape to tell it by")
        else:
            there.setdefault(as_matrix(slot.shape), []).append(i)
    names = [""] * len(slots)
    for shape, indices in there.items():
        found = here.get(shape, [])
        places = [f"group {n} ({HALF[use_muon]})" for n, use_muon in sorted({slots[i].place for i in indices})]
        if len(found) != len(indices):
            here_too = f"{len(found)} ({first_few(found, 3)})" if found else "none"
            complaints.append(f"it has {len(indices)} parameters of shape {shape}, this model {here_too}")
        elif len(places) > 1:
            complaints.append(f"{first_few(found, 3)}: {' and '.join(places)} have this shape {shape}; which is which?")
        for i, name in zip(indices, found, strict=False):
            names[i] = name
    if complaints:
        complaints.append("names, in the order of the state, tell them apart")
    refuse(source, complaints)
    return names


def as_matrix(shape: Sequence[int]) -> tuple[int, ...]:
    """What some Muons flatten a momentum of more than two dims to."""
    return tuple(shape) if len(shape) < 3 else (shape[0], torch.Size(shape[1:]).numel())
