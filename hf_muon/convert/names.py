"""The names of the parameters of a state that may store no names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_muon.convert.formats import ALGORITHM, SourceParameter, format_of, refuse
from hf_muon.diagnostics.log import first_few
from hf_muon.optimizer.muon import Muon
from hf_muon.routing.parameters import unwrapped


def names_of(
    source_params: Sequence[SourceParameter],
    model: nn.Module,
    optimizer: Muon,
    source: str,
    names: Sequence[str] | None,
    in_model_order: bool,
) -> list[str]:
    """Return the model's name of each parameter of a state: `names`, the state's own, or by the source's order.

    Args:
        source_params: parameters of the state, in its order.
        model: the model that `optimizer` is over.
        optimizer: the target of the conversion.
        source: a key of `FORMATS`.
        names: names for `source_params`, where the user knows them.
        in_model_order: whether each of the source's groups lists its parameters in the model's order.

    Raises:
        ValueError: a parameter of the state that matches none of the model's, or more than one.
    """
    params = _parameters(model, optimizer)
    if names is None and all(param.name for param in source_params):
        names = [_without_wrappers(str(param.name), params) for param in source_params]
    if names is not None:
        _check_names(names, source_params, params)
        return list(names)
    if in_model_order:
        return _names_by_shape(source_params, params, source)
    if format_of(source).not_muon is not None:
        return _names_by_format(source_params, params, source)
    raise ValueError(
        f"This state of {source} holds no names, and the user of that optimizer makes its groups. If each group lists "
        "its parameters in the order of model.named_parameters(), say in_model_order; if not (the head before the "
        "embeddings, for one), give names, in the order of the state"
    )


def _parameters(model: nn.Module, optimizer: Muon) -> dict[str, nn.Parameter]:
    """Return the model's parameters in its order, by their names in the optimizer."""
    if not all(group.get("param_names") for group in optimizer.param_groups):
        raise ValueError("The optimizer's param groups hold no names. Make it with build_optimizer(model)")
    own_names = {
        id(param): name
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }
    params = {own_names.get(id(param), name): param for name, param in model.named_parameters()}
    if unknown := [name for name in own_names.values() if name not in params]:
        raise ValueError(f"The optimizer is not over this {type(model).__name__}, which lacks {first_few(unknown)}")
    return params


def _without_wrappers(name: str, params: Mapping[str, Any]) -> str:
    return name if name in params else unwrapped(name, "module")


def _check_names(names: Sequence[str], source_params: Sequence[SourceParameter], params: Mapping[str, Any]) -> None:
    if len(names) != len(source_params):
        raise ValueError(f"names: {len(names)} names for a state of {len(source_params)} parameters")
    for i, name in enumerate(names):
        if name not in params:
            near = difflib.get_close_matches(name, params, n=1)
            raise ValueError(f"names: the model has no {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        if name in names[:i]:
            raise ValueError(f"names: {name!r} stands there twice")


def _names_by_format(
    source_params: Sequence[SourceParameter], params: Mapping[str, nn.Parameter], source: str
) -> list[str]:
    """Return the model's names in the order in which the format lists them.

    The number of parameters and what stepped them must match; shapes are compared later.
    """
    source_format = format_of(source)
    words = source_format.not_muon or ()
    listed = {name: param for name, param in params.items() if param.requires_grad or source_format.lists_frozen}
    use_muon = {name: param.ndim == 2 and not any(word in name for word in words) for name, param in listed.items()}
    order = sorted(listed, key=lambda name: not use_muon[name])
    complaints = [
        f"{param.label} was stepped by {ALGORITHM[param.use_muon]}, where {source} has {name} for "
        f"{ALGORITHM[use_muon[name]]}"
        for name, param in zip(order, source_params, strict=False)
        if param.use_muon != use_muon[name]
    ]
    if len(order) != len(source_params):
        complaints = [
            f"it has {len(source_params)} parameters, and {source} lists {len(order)} of this model's {len(params)}"
        ]
    if complaints:
        complaints.append("another model, choice of what is trained, or rule wrote it; names, in its order, settle it")
    refuse(source, complaints)
    return order


def _names_by_shape(
    source_params: Sequence[SourceParameter], params: Mapping[str, nn.Parameter], source: str
) -> list[str]:
    """Return names by shape. Parameters of one shape, of one group and algorithm only, are in the model's order."""
    names_by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, param in params.items():
        if param.requires_grad:
            names_by_shape.setdefault(as_matrix(param.shape), []).append(name)
    indices_by_shape: dict[tuple[int, ...], list[int]] = {}
    complaints = []
    for i, source_param in enumerate(source_params):
        if source_param.shape is None:
            complaints.append(f"{source_param.label} has no moments, and so no shape to tell it by")
        else:
            indices_by_shape.setdefault(as_matrix(source_param.shape), []).append(i)
    result = [""] * len(source_params)
    for shape, indices in indices_by_shape.items():
        names = names_by_shape.get(shape, [])
        groups = sorted({(source_params[i].group_number, source_params[i].use_muon) for i in indices})
        if len(names) != len(indices):
            count_here = f"{len(names)} ({first_few(names, 3)})" if names else "none"
            complaints.append(f"it has {len(indices)} parameters of shape {shape}, this model {count_here}")
        elif len(groups) > 1:
            texts = [f"group {number} ({ALGORITHM[use_muon]})" for number, use_muon in groups]
            complaints.append(f"{first_few(names, 3)}: {' and '.join(texts)} have this shape {shape}; which is which?")
        for i, name in zip(indices, names, strict=False):
            result[i] = name
    if complaints:
        complaints.append("names, in the order of the state, tell them apart")
    refuse(source, complaints)
    return result


def as_matrix(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which some Muons flatten a momentum of more than two dims."""
    return tuple(shape) if len(shape) < 3 else (shape[0], torch.Size(shape[1:]).numel())
