"""The state of a parameter: its keys, dtypes and zeros, and why a step cannot use one.

How moments are stored is known to :mod:`hf_muon.math.moments` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.math import moments
from hf_muon.math.adamw import uses_fused_adamw
from hf_muon.storage import host
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of

STATE_KEYS = {True: ("momentum_buffer",), False: ("step", "exp_avg", "exp_avg_sq")}
"""State keys of a parameter by `use_muon`; moments that are stored in 8 bits have scales too."""

ALL_STATE_KEYS = frozenset({*STATE_KEYS[True], *STATE_KEYS[False], *moments.SCALES})
"""Other keys, which users may add to the state of a parameter, are neither read nor loaded."""


DTYPE_OPTIONS = {True: "momentum_dtype", False: "adamw_state_dtype"}
"""The option for the dtype of moments, by `use_muon`."""


def state_keys(group: Mapping[str, Any], param: Tensor) -> tuple[str, ...]:
    """Return the state keys of a parameter of a group."""
    return moments.with_scales(STATE_KEYS[bool(group["use_muon"])], dtype_of(group), param.shape)


def has_own(state: Any) -> bool:
    """Return whether a parameter's state has any key of Muon or AdamW."""
    return isinstance(state, Mapping) and not ALL_STATE_KEYS.isdisjoint(state)


def dtype_of(group: Mapping[str, Any]) -> str:
    """Return a group's option for the dtype of its moments; states of older versions may lack it."""
    return str(group.get(DTYPE_OPTIONS[bool(group["use_muon"])], "auto"))


def device_of_moments(group: Mapping[str, Any], param: Tensor) -> torch.device:
    """Return the device on which a parameter's moments are stored; states of older versions lack the option."""
    offload = group.get("momentum_offload", "none")
    return local_of(param).device if offload == "none" else host.moments_device(param, str(offload))


def is_offloaded(group: Mapping[str, Any], param: Tensor) -> bool:
    """Return whether a parameter's moments are stored on the host, and the parameter is not."""
    return group.get("momentum_offload", "none") != "none" and device_of_moments(group, param) != local_of(param).device


def check_params(groups: Sequence[Mapping[str, Any]], first: int = 0) -> None:
    """Raise where a param group has no parameters, not even an empty list.

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


def describe(group: Mapping[str, Any], index: int) -> str:
    """Return the name and shape of a parameter, or its position and shape if the group has no names."""
    names = group.get("param_names")
    param = group["params"][index]
    if names and len(names) != len(group["params"]):
        return f"partition {index}, of {param.numel()} elements, of {first_few(names)}"
    return f"{names[index]} {shape_of(param)}" if names else f"parameter {index} {shape_of(param)}"


def state_complaints(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[str]:
    """Return why a group cannot be stepped with its state: moments are missing, or do not fit their parameter."""
    lost = []
    for i, param in enumerate(group["params"]):
        own = state.get(param, {})
        # Moments in another dtype than the group's are converted before the step, and need the scales of their codes.
        keys = STATE_KEYS[bool(group["use_muon"])]
        scales = [moments.MOMENTS[key].scale for key in keys if key != "step" and moments.lacks_scales(own, key)]
        missing = [key for key in (keys if own else state_keys(group, param)) if key not in own] + scales
        if missing:
            lost.append(f"{describe(group, i)} lacks {', '.join(missing)}")
        for key in (own.keys() & ALL_STATE_KEYS) - {"step", *missing}:
            if (complaint := _mismatch(own[key], param, state_shape(param, key))) is not None:
                yield (
                    f"{describe(group, i)}: its {key} {complaint}. The parameter was resized, redistributed or "
                    "replaced after the optimizer had taken steps; build a new optimizer, or load a checkpoint "
                    "[moment-misfit]"
                )
    if lost and group.get("step"):
        yield (
            f"the optimizer has taken {group['step']} steps and its moments are gone: {first_few(lost)}. They were "
            "dropped on the way (an empty load template, or parameters that were replaced); load a checkpoint that has "
            "them [moments-gone]"
        )


def state_shape(param: Tensor, key: str) -> tuple[int, ...]:
    """Return the shape of a moment; `step`, which is a scalar, has no part in this."""
    return moments.state_shape(key, param.shape)


def _mismatch(moment: Tensor, param: Tensor, shape: tuple[int, ...]) -> str | None:
    """Return how a moment differs in shape or placements from what its parameter needs."""
    if tuple(moment.shape) != shape:
        return f"has shape {tuple(moment.shape)}"
    stored = [(t.placements, t.device_mesh) if is_dtensor(t) else None for t in (moment, param)]  # type: ignore[attr-defined]
    if stored[0] == stored[1]:
        return None
    words = [f"stored as {place[0]}" if place else "a plain tensor" for place in stored]
    return f"is {words[0]}, the parameter {words[1]}"


def state_dtype(param: Tensor, key: str, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a parameter's state, in a group with these options."""
    return torch.float32 if key == "step" else moments.moment_dtype(param, key, dtype_of(group))


def zero_state(param: Tensor, key: str, group: Mapping[str, Any]) -> Tensor:
    """Return a parameter's state before the first step, stored like the parameter."""
    if key == "step":
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")  # a constant, which fake tensors know the value of
    dtype, local = state_dtype(param, key, group), local_of(param)
    if moments.is_quantized(dtype_of(group), param.shape):
        shape = state_shape(local, key)  # contiguous
        offloads = is_offloaded(group, param)
        zeros = host.zeros_like(local, dtype, shape) if offloads else local.new_zeros(shape, dtype=dtype)
        return wrapped_like(param, zeros, state_shape(param, key))
    if is_offloaded(group, param):
        return wrapped_like(param, host.zeros_like(local, dtype), param.shape)
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def wrapped_like(param: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the tensor of this shape of which this rank stores `local`, with the placements of a parameter."""
    if not is_dtensor(param):
        return local
    from hf_muon.storage import dtensor

    return dtensor.stored_like(param, local, shape)  # type: ignore[arg-type]


def complete_state_(group: Mapping[str, Any], state: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Give every parameter of a group the state that a step needs: all keys, on the device and in the dtype it needs.

    Args:
        group: a param group.
        state: of an optimizer, which creates an empty dict for a parameter without state.
    """
    fused = not group["use_muon"] and uses_fused_adamw(group["params"], dtype_of(group))
    for param in group["params"]:
        own = state[param]
        keys = state_keys(group, param)
        if any(moments.SCALES[key] in own and (key in own) != (key in keys) for key in moments.SCALES):
            converted = converted_moments(param, own, group)
            for key in own.keys() & ALL_STATE_KEYS - {"step"}:
                del own[key]
            own.update(converted)
        for key in keys:
            if key not in own:
                own[key] = zero_state(param, key, group)
            device, dtype = device_of_moments(group, param), state_dtype(param, key, group)
            if key == "step":
                device = device if fused else torch.device("cpu")
                own[key] = torch.as_tensor(own[key], dtype=dtype, device=device)
            elif own[key].dtype != dtype or own[key].device != device:
                own[key] = _copied(param, own[key], key, group)


def blocks_complaint(group: Mapping[str, Any], param: Tensor) -> str | None:
    """Return why a parameter's moments cannot be stored in its group's dtype."""
    if not (is_dtensor(param) and moments.is_quantized(dtype_of(group), param.shape)):
        return None
    from hf_muon.storage.dtensor import quantization_complaint

    return quantization_complaint(param, DTYPE_OPTIONS[bool(group["use_muon"])])  # type: ignore[arg-type]


def converted_moments(param: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the moments of a parameter as its group stores them, in memory of their own.

    Args:
        param: the parameter; the result is stored like it.
        state: its moments, whole or stored like the parameter.
        group: the param group.
    """
    converted: dict[str, Tensor] = {}
    for key in STATE_KEYS[bool(group["use_muon"])]:
        if key in state and key != "step":
            converted |= _converted_moment(param, state, key, group)
    return converted


def _converted_moment(
    param: Tensor, state: Mapping[str, Tensor], key: str, group: Mapping[str, Any]
) -> dict[str, Tensor]:
    scale = moments.MOMENTS[key].scale
    state = {own: state[own] for own in (key, scale) if own in state}
    keys = moments.with_scales([key], dtype_of(group), param.shape)
    from_blocks, to_blocks = scale in state, scale in keys
    # Whole codes that are to become numbers are decoded first: here their blocks may be cut.
    if to_blocks or (from_blocks and any(map(is_dtensor, state.values()))):
        state = {own: stored_like(param, value) for own, value in state.items()}
    if from_blocks and to_blocks:
        return {own: _copied(param, value, own, group) for own, value in state.items()}
    stored = state[key]
    if from_blocks:
        values = moments.decoded({own: local_of(value) for own, value in state.items()}, key)
        stored = wrapped_like(param, values, param.shape) if is_dtensor(stored) else values
    if not to_blocks:
        return {key: _copied(param, stored_like(param, stored), key, group)}
    zeros = {own: zero_state(param, own, group) for own in keys}
    moments.encode_({own: local_of(zero) for own, zero in zeros.items()}, key, local_of(stored))
    return zeros


def _copied(param: Tensor, value: Tensor, key: str, group: Mapping[str, Any]) -> Tensor:
    """Return a copy of a moment in the dtype and on the device of the group's; stored like the parameter, as it is."""
    dtype = state_dtype(param, key, group)
    if is_offloaded(group, param):
        local = local_of(value) if dtype.is_floating_point else local_of(value).contiguous()
        return wrapped_like(param, host.copied(local, dtype, param.device), value.shape)
    copy = value.to(device=param.device, dtype=dtype, copy=True)
    return copy if dtype.is_floating_point else copy.contiguous()


def stored_like(param: Tensor, value: Tensor) -> Tensor:
    """Return a tensor, whole or with other placements, stored like a parameter. DTensors may need communication."""
    if not is_dtensor(param):
        return value
    if is_dtensor(value):
        return value.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined, no-any-return]
    from hf_muon.storage.dtensor import sharded_like

    return sharded_like(param, value)  # type: ignore[arg-type]
