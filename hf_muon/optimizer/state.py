"""The state of a parameter: its keys, dtypes and zeros, and why a step cannot use one.

How momentum is stored is known to :mod:`hf_muon.math.momentum` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.math import adamw, momentum
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of

STATE_KEYS = {True: ("momentum_buffer",), False: ("step", "exp_avg", "exp_avg_sq")}
"""State keys of a parameter by `use_muon`; momentum that is stored as int8 has a `momentum_scale` too."""

ALL_STATE_KEYS = frozenset({*STATE_KEYS[True], *STATE_KEYS[False], *momentum.STATE_KEYS})
"""Other keys, which users may add to the state of a parameter, are neither read nor loaded."""


def state_keys(group: Mapping[str, Any], param: Tensor, momentum_dtype: str | None = None) -> tuple[str, ...]:
    """Return the state keys of a parameter of a group, or those it would have with another `momentum_dtype`."""
    if not group["use_muon"]:
        return STATE_KEYS[False]
    return momentum.state_keys(momentum_dtype or momentum_dtype_of(group), param.shape)


def has_own(state: Any) -> bool:
    """Return whether a parameter's state has any key of Muon or AdamW."""
    return isinstance(state, Mapping) and not ALL_STATE_KEYS.isdisjoint(state)


def momentum_dtype_of(group: Mapping[str, Any]) -> str:
    """Return the `momentum_dtype` of a group; states of older versions lack the option, and are in fp32."""
    return str(group.get("momentum_dtype", "auto"))


def adamw_state_dtype_of(group: Mapping[str, Any]) -> str:
    """Return the `adamw_state_dtype` of a group; states of older versions lack the option."""
    return str(group.get("adamw_state_dtype", "auto"))


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
        moments = state.get(param, {})
        # Momentum in another dtype than the group's is converted before the step, and needs the keys of its own dtype.
        keys = state_keys(group, param, momentum.stored_dtype(moments) if moments else None)
        missing = [key for key in keys if key not in moments]
        if missing:
            lost.append(f"{describe(group, i)} lacks {', '.join(missing)}")
        for key in (moments.keys() & ALL_STATE_KEYS) - {"step", *missing}:
            if (complaint := _mismatch(moments[key], param, state_shape(param, key))) is not None:
                yield (
                    f"{describe(group, i)}: its {key} {complaint}. The parameter was resized, redistributed or "
                    "replaced after the optimizer had taken steps; build a new optimizer, or load a checkpoint"
                )
    if lost and group.get("step"):
        yield (
            f"the optimizer has taken {group['step']} steps and its moments are gone: {first_few(lost)}. They were "
            "dropped on the way (an empty load template, or parameters that were replaced); load a checkpoint that has "
            "them"
        )


def state_shape(param: Tensor, key: str) -> tuple[int, ...]:
    """Return the shape of a moment; `step`, which is a scalar, has no part in this."""
    return momentum.state_shape(key, param.shape)


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
    if key in momentum.STATE_KEYS:
        return momentum.state_dtype(key, param, momentum_dtype_of(group))
    return torch.float32 if key == "step" else adamw.moment_dtype(param, adamw_state_dtype_of(group))


def zero_state(param: Tensor, key: str, group: Mapping[str, Any]) -> Tensor:
    """Return a parameter's state before the first step, stored like the parameter."""
    if key == "step":
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")  # a constant, which fake tensors know the value of
    dtype = state_dtype(param, key, group)
    if key in momentum.STATE_KEYS and momentum.is_quantized(momentum_dtype_of(group), param.shape):
        local = local_of(param)
        zeros = torch.zeros(state_shape(local, key), dtype=dtype, device=local.device)  # contiguous
        return wrapped_like(param, zeros, state_shape(param, key))
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def wrapped_like(param: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the tensor of this shape of which this rank stores `local`, with the placements of a parameter."""
    if not is_dtensor(param):
        return local
    from hf_muon.storage import dtensor

    return dtensor.stored_like(param, local, shape)  # type: ignore[arg-type]


def complete_state_(group: Mapping[str, Any], state: MutableMapping[Tensor, dict[str, Any]]) -> None:
    """Give every parameter of a group the state that a step needs: all keys, on its device, in the group's dtypes.

    Args:
        group: a param group.
        state: of an optimizer, which creates an empty dict for a parameter without state.
    """
    fused = not group["use_muon"] and adamw.uses_fused_adamw(group["params"])
    for param in group["params"]:
        moments = state[param]
        keys = state_keys(group, param)
        if momentum.BUFFER in moments and (momentum.SCALE in moments) != (momentum.SCALE in keys):
            converted = converted_momentum(param, moments, group)
            moments.clear()
            moments.update(converted)
        for key in keys:
            if key not in moments:
                moments[key] = zero_state(param, key, group)
            device = torch.device("cpu") if key == "step" and not fused else param.device
            dtype = state_dtype(param, key, group)
            if not torch.is_tensor(moments[key]):
                moments[key] = torch.as_tensor(moments[key], dtype=dtype, device=device)
            elif moments[key].dtype != dtype or moments[key].device != device:
                moments[key] = moments[key].to(device=device, dtype=dtype)


def blocks_complaint(group: Mapping[str, Any], param: Tensor) -> str | None:
    """Return why a parameter's momentum cannot be stored in its group's `momentum_dtype`."""
    quantized = group["use_muon"] and momentum.is_quantized(momentum_dtype_of(group), param.shape)
    if not (quantized and is_dtensor(param)):
        return None
    from hf_muon.storage.dtensor import quantization_complaint

    return quantization_complaint(param)  # type: ignore[arg-type]


def converted_momentum(param: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return momentum as a group with this `momentum_dtype` stores it, in memory of its own.

    Args:
        param: the parameter; the result is stored like it.
        state: the momentum, whole or stored like the parameter.
        group: the param group.
    """
    state = {key: state[key] for key in momentum.STATE_KEYS if key in state}
    keys = momentum.state_keys(momentum_dtype_of(group), param.shape)
    from_blocks, to_blocks = momentum.SCALE in state, momentum.SCALE in keys
    # Whole int8 momentum that is not to be int8 is decoded first: here its blocks may be cut.
    if to_blocks or (from_blocks and any(map(is_dtensor, state.values()))):
        state = {key: stored_like(param, value) for key, value in state.items()}
    if from_blocks and to_blocks:
        return {key: _copied(param, value, state_dtype(param, key, group)) for key, value in state.items()}
    buffer = state[momentum.BUFFER]
    if from_blocks:
        values = momentum.decoded({key: local_of(value) for key, value in state.items()})
        buffer = wrapped_like(param, values, param.shape) if is_dtensor(buffer) else values
    if not to_blocks:
        dtype = state_dtype(param, momentum.BUFFER, group)
        return {momentum.BUFFER: _copied(param, stored_like(param, buffer), dtype)}
    zeros = {key: zero_state(param, key, group) for key in keys}
    momentum.encode_({key: local_of(zero) for key, zero in zeros.items()}, local_of(buffer))
    return zeros


def _copied(param: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    copy = value.to(device=param.device, dtype=dtype, copy=True)
    return copy.contiguous() if dtype is torch.int8 else copy


def stored_like(param: Tensor, value: Tensor) -> Tensor:
    """Return a tensor, whole or with other placements, stored like a parameter. DTensors may need communication."""
    if not is_dtensor(param):
        return value
    if is_dtensor(value):
        return value.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined, no-any-return]
    from hf_muon.storage.dtensor import sharded_like

    return sharded_like(param, value)  # type: ignore[arg-type]
