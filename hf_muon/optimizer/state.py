"""The state of parameters: its entries, initial zeros, conversion, and checks before a step.

`entries_of` describes the state of a param group. Steps, saves, loads and the templates of
torch.distributed.checkpoint all use it. Only :mod:`hf_muon.math.moments` knows how moments are stored.

Rules may keep state, too. State of the kind `weight` is stored like its parameter. State by row is small: every rank
that stores a part of a parameter has the state of all of its matrices, in one flat tensor, and the owner of a matrix
sends its changes to all of them after a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.math import moments
from hf_muon.math.adamw import uses_fused_adamw
from hf_muon.math.moments import MOMENTS, SCALES
from hf_muon.rules import registry
from hf_muon.storage import views
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Any]]

ALGORITHM = {True: "Muon", False: "AdamW"}
"""By `use_muon`."""

STATE_KEYS = {True: ("momentum_buffer",), False: ("step", "exp_avg", "exp_avg_sq")}
"""State keys of a parameter by `use_muon`; moments that are stored in 8 bits have scales too."""

ALL_STATE_KEYS = frozenset({*STATE_KEYS[True], *STATE_KEYS[False], *SCALES})
"""The keys of Muon and AdamW. Other keys are those of rules, or of users, which are neither read nor loaded."""

DTYPE_OPTIONS = {True: "momentum_dtype", False: "adamw_state_dtype"}
"""The option for the dtype of moments, by `use_muon`."""


# --- param groups


def dtype_of(group: Group) -> str:
    """Return a group's option for the dtype of its moments; a saved group may lack it."""
    return str(group.get(DTYPE_OPTIONS[bool(group["use_muon"])], "auto"))


def blocks_complaint(group: Group, param: Tensor) -> str | None:
    """Return why a parameter's moments cannot be stored in its group's dtype."""
    if not (is_dtensor(param) and moments.is_quantized(dtype_of(group), param.shape)):
        return None
    from hf_muon.storage.dtensor import quantization_complaint

    return quantization_complaint(param, DTYPE_OPTIONS[bool(group["use_muon"])])  # type: ignore[arg-type]


def check_params(groups: Sequence[Group], first: int = 0) -> None:
    """Raise if a param group has no parameters, not even an empty list.

    Args:
        groups: param groups.
        first: position of the first of them.

    Raises:
        ValueError: the group, and the keys that it has.
    """
    for k, group in enumerate(groups, first):
        if "params" not in group:
            raise ValueError(
                f"param group {k} has no 'params', but {first_few(group) or 'nothing'}. Write the list of its "
                "parameters into it under 'params', or take the group out [no-params]"
            )


def describe(group: Group, index: int) -> str:
    """Return the name and shape of a parameter, or its position and shape if the group has no names."""
    names = group.get("param_names")
    param = group["params"][index]
    if names and len(names) != len(group["params"]):
        return f"partition {index}, of {param.numel()} elements, of {first_few(names)}"
    return f"{names[index]} {shape_of(param)}" if names else f"parameter {index} {shape_of(param)}"


# --- what a state must have


class Entry(NamedTuple):
    """One entry of the state of a parameter.

    Attributes:
        shape: the whole shape; None for the state by row of a flat partition, whose matrices only its layout knows.
        dtype: the dtype of the tensor.
        device: where it lies: that of the parameter, but for AdamW's number of steps on the host.
        sharded: whether it is stored with the placements of the parameter; else each rank has all of it.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    sharded: bool = True

    def fits(self, value: Tensor) -> bool:
        """Return whether a tensor has the shape."""
        return value.ndim == 1 if self.shape is None else value.shape == self.shape


def entries_of(group: Group) -> Iterator[dict[str, Entry]]:
    """Yield what the state of each parameter of a group must have, by key; equal parameters share a dict."""
    rules = registry.state_of(group)
    fused = not group["use_muon"] and uses_fused_adamw(group["params"], dtype_of(group))
    cache: dict[Any, dict[str, Entry]] = {}
    for param, view in zip(group["params"], views.views_of(group), strict=True):
        kind = param.shape, param.dtype, param.device, is_dtensor(param), shape_of(param), view
        if kind not in cache:
            cache[kind] = _entries(group, param, view, rules, fused=fused)
        yield cache[kind]


def _entries(group: Group, param: Tensor, view: str, rules: Mapping[str, str], *, fused: bool) -> dict[str, Entry]:
    dtype, device, entries = dtype_of(group), local_of(param).device, {}
    for key in moments.with_scales(STATE_KEYS[bool(group["use_muon"])], dtype, param.shape):
        if key == "step":
            # torch's fused kernel reads the counter on its device. Else the host reads it, and must not wait for one.
            entries[key] = Entry((), torch.float32, device if fused else torch.device("cpu"), sharded=False)
        else:
            shape = moments.state_shape(key, param.shape)
            entries[key] = Entry(shape, moments.moment_dtype(param, key, dtype), device)
    for key, kind in rules.items():
        if kind == "weight":
            entries[key] = Entry(tuple(param.shape), torch.promote_types(param.dtype, torch.float32), device)
        else:
            whole = shape_of(param)
            numel = (row_numel(whole, view),) if len(whole) >= 2 else None
            entries[key] = Entry(numel, torch.float32, device, sharded=False)
    return entries


def is_by_row(key: str) -> bool:
    """Return whether a key is that of a rule's state by row, which is not stored like its parameter."""
    return registry.state_kinds().get(key) == "row"


def is_known(key: str) -> bool:
    """Return whether a key is one of Muon, AdamW or a rule, and not a user's own."""
    return key in ALL_STATE_KEYS or key in registry.state_kinds()


def row_shape(shape: Sequence[int], *, transposed: bool) -> tuple[int, int, int]:
    """Return the shape ``(B, out, 1)`` of the state by row of a matrix or stack.

    Args:
        shape: ``(m, n)`` or ``(B, m, n)``, as it is stored.
        transposed: whether that is ``(in, out)``.
    """
    return math.prod(shape[:-2]), shape[-1 if transposed else -2], 1


def row_numel(stored: Sequence[int], text: str) -> int:
    """Return the number of elements of the flat state by row of a parameter.

    Args:
        stored: shape of the parameter.
        text: the text of its view.
    """
    view = views.parse(text)
    return sum(math.prod(row_shape(shape, transposed=view.transposed)) for shape in view.shapes(stored))


def flat_zeros(param: Tensor, numel: int) -> Tensor:
    """Return the state by row of a parameter before the first step."""
    return torch.zeros(numel, dtype=torch.float32, device=local_of(param).device)


# --- zeros, and conversion


def completed(group: Group, state: State) -> Iterator[dict[str, Any]]:
    """Yield the state of each parameter of a group as a step needs it: in its dtype, on its device, and nothing else.

    State by row of flat partitions is left to the step, which knows their matrices. Keys of users stay. What is there
    is not changed, and stays the same tensor if it fits.

    Args:
        group: a param group.
        state: the state of its parameters.
    """
    for param, entries in zip(group["params"], entries_of(group), strict=True):
        found = state.get(param, {})
        values = dict(found)
        # The group's dtype has been changed to or from int8 since this state was made.
        if any(key in found and (scale in found) != (scale in entries) for scale, key in SCALES.items()):
            values.update(converted(param, found, entries))
        for key in [key for key in values if key not in entries and is_known(key)]:
            del values[key]
        for key, entry in entries.items():
            if key not in values:
                if entry.shape is not None:
                    values[key] = zero_state(param, key, entry)
            elif key == "step":
                values[key] = torch.as_tensor(values[key], dtype=entry.dtype, device=entry.device)
            elif values[key].dtype != entry.dtype or values[key].device != entry.device:
                values[key] = _copied(param, values[key], entry)
        yield values


def zero_state(param: Tensor, key: str, entry: Entry) -> Tensor:
    """Return a parameter's state under a key before the first step; codes and scales are contiguous."""
    if key == "step":
        # A constant, whose value even a fake tensor knows.
        return torch.tensor(0.0, dtype=entry.dtype, device=entry.device)
    whole, local = entry.shape or (), local_of(param)
    if not entry.sharded:
        return flat_zeros(param, math.prod(whole))
    if key not in SCALES and entry.dtype.is_floating_point:
        return torch.zeros_like(param, dtype=entry.dtype, memory_format=torch.preserve_format)
    return wrapped_like(param, local.new_zeros(moments.state_shape(key, local.shape), dtype=entry.dtype), whole)


def converted(param: Tensor, state: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Return copies of a parameter's moments and state of rules, as entries describe them.

    Moments that are not there are left out, and so is the number of steps. State of rules that is not there, or does
    not fit, starts from zero.

    Args:
        param: the parameter; the result is stored like it.
        state: the state of the parameter, whole or with any placements, in any dtypes.
        entries: what the state of the parameter must have.
    """
    new: dict[str, Tensor] = {}
    for key, entry in entries.items():
        if key in MOMENTS and key in state:
            new |= _converted_moment(param, state, key, entries)
        elif key not in ALL_STATE_KEYS and key in state and entry.fits(state[key]):
            new[key] = _copied(param, state[key], entry)
        elif key not in ALL_STATE_KEYS and entry.shape is not None:
            new[key] = zero_state(param, key, entry)
    return new


def _converted_moment(
    param: Tensor, state: Mapping[str, Tensor], key: str, entries: Mapping[str, Entry]
) -> dict[str, Tensor]:
    """Return a moment, with its scales if it is stored in 8 bits."""
    scale = MOMENTS[key].scale
    saved = {name: state[name] for name in (key, scale) if name in state}
    keys = [name for name in (key, scale) if name in entries]
    # From int8. Whole codes are decoded before they are sharded, which may cut their blocks.
    if scale in saved and scale not in keys:
        if any(map(is_dtensor, saved.values())):
            saved = {name: stored_like(param, value) for name, value in saved.items()}
        values = moments.decoded({name: local_of(value) for name, value in saved.items()}, key)
        saved = {key: wrapped_like(saved[key], values, saved[key].shape)}
    # To int8: sharded first, so that each rank encodes only what it stores.
    if scale not in saved and scale in keys:
        codes = {name: zero_state(param, name, entries[name]) for name in keys}
        values = local_of(stored_like(param, saved[key]))
        moments.encode_({name: local_of(code) for name, code in codes.items()}, key, values)
        return codes
    return {name: _copied(param, saved[name], entries[name]) for name in keys}


def _copied(param: Tensor, value: Tensor, entry: Entry) -> Tensor:
    """Return a copy of a value as an entry describes it."""
    value = stored_like(param, value) if entry.sharded else value
    copy = value.to(device=entry.device, dtype=entry.dtype, copy=True)
    return copy if entry.dtype.is_floating_point else copy.contiguous()


def stored_like(param: Tensor, value: Tensor) -> Tensor:
    """Return a tensor, whole or with other placements, stored like a parameter. DTensors may need communication."""
    if not is_dtensor(param):
        return value
    if is_dtensor(value):
        return value.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined, no-any-return]
    from hf_muon.storage.dtensor import sharded_like

    return sharded_like(param, value)  # type: ignore[arg-type]


def wrapped_like(param: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the tensor of this shape of which this rank stores `local`, with the placements of another tensor."""
    if not is_dtensor(param):
        return local
    from hf_muon.storage.dtensor import wrapped

    return wrapped(param, local, shape)  # type: ignore[arg-type]


# --- checks of a step and of a save


def state_complaints(groups: Sequence[Group], state: State) -> Iterator[str]:
    """Say why groups cannot be stepped with their state: moments are missing, or do not fit their parameter."""
    for group in groups:
        keys, lost = STATE_KEYS[bool(group["use_muon"])], []
        for i, param in enumerate(group["params"]):
            values = state.get(param, {})
            # Codes need their scales, also where the group's dtype has none: they are converted before the step.
            missing = [key for key in keys if key not in values]
            missing += [scale for scale, key in SCALES.items() if key in keys and moments.lacks_scales(values, key)]
            if missing:
                lost.append(f"{describe(group, i)} lacks {', '.join(missing)}")
            for key in values.keys() & ALL_STATE_KEYS - {"step", *missing}:
                if complaint := _mismatch(values[key], param, moments.state_shape(key, param.shape)):
                    yield (
                        f"{describe(group, i)}: its {key} {complaint}. The parameter was resized, redistributed or "
                        "replaced after the optimizer had taken steps; build a new optimizer, or load a checkpoint "
                        "[moment-misfit]"
                    )
        if lost and group.get("step"):
            yield (
                f"the optimizer has taken {group['step']} steps and its moments are gone: {first_few(lost)}. They were "
                "dropped on the way (an empty load template, or parameters that were replaced); load a checkpoint that "
                "has them, or put parameters that are new into a param group of their own. To begin anew on purpose, "
                "set step to 0 in each param group, too [moments-gone]"
            )


def _mismatch(moment: Tensor, param: Tensor, shape: tuple[int, ...]) -> str | None:
    """Return how a moment differs in shape or placements from what its parameter needs, or why no step can write it."""
    if tuple(moment.shape) != shape:
        return f"has shape {tuple(moment.shape)}"
    local = local_of(moment)
    if local.layout is not torch.strided:
        return "is sparse"
    if local.is_inference() and not torch.is_inference_mode_enabled():
        return "was made under torch.inference_mode"
    if any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)):
        return "is expanded: its elements share memory"
    stored = [(t.placements, t.device_mesh) if is_dtensor(t) else None for t in (moment, param)]  # type: ignore[attr-defined]
    if stored[0] == stored[1]:
        return None
    words = [f"stored as {place[0]}" if place else "a plain tensor" for place in stored]
    return f"is {words[0]}, the parameter {words[1]}"
