"""The state that rules keep for the parameters of Muon groups.

State of the kind `weight` is stored like its parameter. State by row is small: every rank that stores some of a
parameter has the state of all of its matrices, in one flat tensor, and the owner of a matrix sends what it has changed
to all of them after a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.optimizer.state import describe, stored_like
from hf_muon.rules import registry
from hf_muon.storage import views
from hf_muon.storage.tensors import local_of, shape_of

Group = Mapping[str, Any]


def rule_keys(group: Group) -> tuple[str, ...]:
    """Return the keys of the state that the rules of a group keep for each parameter."""
    return tuple(registry.state_of(group))


def is_rule_key(key: str) -> bool:
    """Return whether a rule keeps its state under a key."""
    return key in registry.state_kinds()


def is_reduced(key: str) -> bool:
    """Return whether the state of a rule under a key is not stored like its parameter."""
    return registry.state_kinds().get(key, "weight") != "weight"


def is_partition(group: Group, param: Tensor) -> bool:
    """Return whether a parameter of a Muon group is a flat partition, whose matrices are not known from its shape."""
    return bool(group["use_muon"]) and len(shape_of(param)) < 2


def reduced_shape(shape: Sequence[int], *, transposed: bool) -> tuple[int, int, int]:
    """Return the shape ``(B, out, 1)`` of the state of a matrix or stack by row.

    Args:
        shape: ``(m, n)`` or ``(B, m, n)``, as it is stored.
        transposed: whether that is ``(in, out)``.
    """
    return math.prod(shape[:-2]), shape[-1 if transposed else -2], 1


def reduced_shapes(stored: Sequence[int], text: str) -> list[tuple[int, int, int]]:
    """Return the shapes of the state of each matrix of a parameter.

    Args:
        stored: shape of the parameter.
        text: of its view.
    """
    view = views.parse(text)
    shapes = view.shapes(stored)
    return [reduced_shape(shape, transposed=view.transposed) for shape in shapes]


def reduced_numel(shapes: Iterable[Sequence[int]]) -> int:
    """Return the number of elements of the flat tensor that holds state of these shapes."""
    return sum(map(math.prod, shapes))


def _numel(group: Group, index: int) -> int:
    """Return the number of elements of a parameter's flat state; the parameter is no flat partition."""
    return reduced_numel(reduced_shapes(shape_of(group["params"][index]), views.views_of(group)[index]))


def zeros(group: Group, index: int, key: str) -> Tensor:
    """Return a parameter's state before the first step; of a flat partition only where it is stored like that."""
    param = group["params"][index]
    if not is_reduced(key):
        return torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))
    return flat_zeros(param, _numel(group, index))


def flat_zeros(param: Tensor, numel: int) -> Tensor:
    """Return flat state of a parameter before the first step."""
    return torch.zeros(numel, dtype=torch.float32, device=local_of(param).device)


def complete_(group: Group, state: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Give every parameter of a group the state that its rules need, and take what they do not need.

    Small state of flat partitions is left to the step, which knows their matrices.
    """
    keys = rule_keys(group)
    for i, param in enumerate(group["params"]):
        own = state[param]
        for key in [key for key in own if is_rule_key(key) and key not in keys]:
            del own[key]
        for key in keys:
            if key not in own and not (is_reduced(key) and is_partition(group, param)):
                own[key] = zeros(group, i, key)


class Kept:
    """The shapes of the state of rules, as steps of this process have left it: it must be there later."""

    def __init__(self) -> None:
        self._shapes: dict[Tensor, dict[str, torch.Size]] = {}

    def note(self, groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Any]], *, forgets_others: bool) -> None:
        """Note the state of the parameters that stand in the groups, after a step.

        Args:
            groups: param groups.
            state: of their parameters.
            forgets_others: whether there are no other parameters.
        """
        if forgets_others:
            self._shapes.clear()
        for group in groups:
            keys = rule_keys(group)
            for param in group["params"] if keys else ():
                own = state.get(param, {})
                self._shapes[param] = {key: own[key].shape for key in keys if key in own}

    def complaints(self, groups: Sequence[Group], state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[str]:
        """Say which state of rules is gone, or does not have its shape any more."""
        for group in groups:
            needed = rule_keys(group)
            for i, param in enumerate(group["params"] if needed else ()):
                own = state.get(param, {})
                for key, shape in self._shapes.get(param, {}).items():
                    if key in needed and (key not in own or own[key].shape != shape):
                        text = (
                            f"has shape {tuple(own[key].shape)}, no longer {tuple(shape)}" if key in own else "is gone"
                        )
                        yield (
                            f"{describe(group, i)}: its {key} {text}. "
                            "It was dropped or resized on the way; load a checkpoint that has it [rule-state-gone]"
                        )


def loaded(group: Group, index: int, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of a parameter's saved state as far as the rules of its group need it and it fits.

    Args:
        group: the param group of this run.
        index: of the parameter.
        saved: its state in the checkpoint, whole or stored like the parameter.
    """
    param = group["params"][index]
    state: dict[str, Tensor] = {}
    for key in rule_keys(group):
        if key not in saved or complaint(group, index, key, saved[key]):
            continue
        value = saved[key] if is_reduced(key) else stored_like(param, saved[key])
        dtype = torch.float32 if is_reduced(key) else torch.promote_types(param.dtype, torch.float32)
        state[key] = value.to(device=param.device, dtype=dtype, copy=True)
    return state


def complaint(group: Group, index: int, key: str, value: Any) -> str | None:
    """Say why a value cannot be a parameter's state under a key of a rule; None where it can."""
    if not isinstance(value, Tensor):
        return "is not a tensor [not-a-tensor]"
    if not is_reduced(key):
        fits = tuple(value.shape) == tuple(group["params"][index].shape) and value.dtype.is_floating_point
        return None if fits else f"has shape {tuple(value.shape)} and dtype {value.dtype} [moment-shape]"
    if value.ndim != 1 or value.dtype != torch.float32:
        return f"has shape {tuple(value.shape)} and dtype {value.dtype}, not one dim in fp32 [moment-shape]"
    param = group["params"][index]
    if is_partition(group, param):
        return None  # its layout knows
    numel = _numel(group, index)
    return (
        None
        if value.numel() == numel
        else f"has {value.numel()} elements, and its matrices need {numel} [moment-shape]"
    )
