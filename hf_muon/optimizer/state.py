"""The state of a parameter: its keys, dtypes and zeros, and what is wrong with one that a step would use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics.log import first_few
from hf_muon.math.momentum import Quantized, is_quantized, momentum_dtype, scale_shape
from hf_muon.storage.tensors import is_dtensor, local_of, shape_of

STATE_KEYS = {True: ("momentum_buffer",), False: ("step", "exp_avg", "exp_avg_sq")}
"""State of a parameter by `use_muon`; momentum that is kept as int8 has a `momentum_scale` besides."""

ALL_STATE_KEYS = frozenset({*STATE_KEYS[True], *STATE_KEYS[False], "momentum_scale"})
"""What a user keeps beside these in the state of a parameter is neither looked at nor loaded."""


def state_keys(group: Mapping[str, Any], param: Tensor, choice: str | None = None) -> tuple[str, ...]:
    """State of a parameter of a group; `choice` is another `momentum_dtype` than the group's."""
    keys = STATE_KEYS[bool(group["use_muon"])]
    quantized = group["use_muon"] and is_quantized(choice or momentum_choice(group), param.shape)
    return (*keys, "momentum_scale") if quantized else keys


def has_own(state: Any) -> bool:
    """Whether a parameter's state holds anything of Muon's or AdamW's."""
    return isinstance(state, Mapping) and not ALL_STATE_KEYS.isdisjoint(state)


def momentum_choice(group: Mapping[str, Any]) -> str:
    """Return the `momentum_dtype` of a group; states of older versions do not say, and have it in fp32."""
    return str(group.get("momentum_dtype", "auto"))


def describe(group: Mapping[str, Any], index: int) -> str:
    """A parameter by name where the group has names, else by position and shape."""
    names = group.get("param_names")
    param = group["params"][index]
    if names and len(names) != len(group["params"]):
        return f"partition {index}, of {param.numel()} elements, of {first_few(names)}"
    return f"{names[index]} {shape_of(param)}" if names else f"parameter {index} {shape_of(param)}"


def state_complaints(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with the live state of a group: moments lost on the way, or of a parameter that has changed."""
    lost = []
    for i, param in enumerate(group["params"]):
        found = state.get(param, {})
        # Momentum in another dtype than the group's is converted before the step, and needs what its own dtype does.
        keys = state_keys(group, param, _dtype_of(found) if found else None)
        missing = [key for key in keys if key not in found]
        if missing:
            lost.append(f"{describe(group, i)} lacks {', '.join(missing)}")
        for key in (found.keys() & ALL_STATE_KEYS) - {"step", *missing}:
            if (complaint := _unlike(found[key], param, state_shape(param, key))) is not None:
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


def _dtype_of(state: Mapping[str, Any]) -> str:
    buffer = state.get("momentum_buffer")
    return "int8" if torch.is_tensor(buffer) and buffer.dtype is torch.int8 else "auto"


def state_shape(param: Tensor, key: str) -> tuple[int, ...]:
    """Return the shape of a moment; AdamW's `step` has none."""
    return scale_shape(param.shape) if key == "momentum_scale" else tuple(param.shape)


def _unlike(moment: Tensor, param: Tensor, shape: tuple[int, ...]) -> str | None:
    """How a moment differs from what its parameter's would be."""
    if tuple(moment.shape) != shape:
        return f"has shape {tuple(moment.shape)}"
    stored = [(t.placements, t.device_mesh) if is_dtensor(t) else None for t in (moment, param)]  # type: ignore[attr-defined]
    if stored[0] == stored[1]:
        return None
    words = [f"stored as {place[0]}" if place else "a plain tensor" for place in stored]
    return f"is {words[0]}, the parameter {words[1]}"


def state_dtype(param: Tensor, key: str, choice: str = "auto") -> torch.dtype:
    """The dtype in which a state is kept; `choice` is the group's `momentum_dtype`."""
    if key in ("step", "momentum_scale"):
        return torch.float32
    return momentum_dtype(param, choice) if key == "momentum_buffer" else param.dtype


def zero_state(param: Tensor, key: str, choice: str = "auto") -> Tensor:
    """A state before the first step, stored like the parameter; `choice` is the group's `momentum_dtype`."""
    if key == "step":
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")  # a constant, which fake tensors know the value of
    dtype = state_dtype(param, key, choice)
    if key == "momentum_scale" or dtype is torch.int8:
        local = local_of(param)
        zeros = torch.zeros(state_shape(local, key), dtype=dtype, device=local.device)
        return wrapped_like(param, zeros, state_shape(param, key))
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def wrapped_like(param: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """What this rank has of a tensor of some shape, stored like the parameter."""
    if not is_dtensor(param):
        return local
    from hf_muon.storage import dtensor

    return dtensor.stored_like(param, local, shape)  # type: ignore[arg-type]


def blocks_complaint(group: Mapping[str, Any], param: Tensor) -> str | None:
    """Why a parameter's momentum cannot be kept as its group says."""
    if not (group["use_muon"] and is_quantized(momentum_choice(group), param.shape) and is_dtensor(param)):
        return None
    from hf_muon.storage.dtensor import blocks_complaint

    return blocks_complaint(param)  # type: ignore[arg-type]


def kept_momentum(param: Tensor, state: Mapping[str, Tensor], choice: str) -> dict[str, Tensor]:
    """Momentum in the dtype of a choice, in memory of its own.

    Args:
        param: stored as the result will be.
        state: `momentum_buffer`, with `momentum_scale` where that holds codes; whole, or stored like the parameter.
        choice: one of `MOMENTUM_DTYPES`.
    """
    state = {key: value for key, value in state.items() if key in ("momentum_buffer", "momentum_scale")}
    to_int8 = is_quantized(choice, param.shape)
    if to_int8 or ("momentum_scale" in state and any(map(is_dtensor, state.values()))):
        state = {key: stored_like(param, value) for key, value in state.items()}
    if "momentum_scale" in state and to_int8:
        dtypes = {"momentum_buffer": torch.int8, "momentum_scale": torch.float32}
        return {key: _copied(param, value, dtypes[key]) for key, value in state.items()}
    buffer = state["momentum_buffer"]
    if "momentum_scale" in state:
        kept = Quantized(local_of(buffer).to(torch.int8), local_of(state["momentum_scale"]))
        values = kept.values() if kept.codes.numel() else kept.codes.float()
        buffer = wrapped_like(param, values, param.shape) if is_dtensor(buffer) else values
    if not to_int8:
        return {
            "momentum_buffer": _copied(param, stored_like(param, buffer), state_dtype(param, "momentum_buffer", choice))
        }
    made = {key: zero_state(param, key, choice) for key in ("momentum_buffer", "momentum_scale")}
    if local_of(param).numel():
        kept = Quantized(*(local_of(value) for value in made.values()))
        kept.store_(local_of(buffer).to(kept.codes.device, torch.float32))
    return made


def _copied(param: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    copy = value.to(device=param.device, dtype=dtype, copy=True)
    return copy.contiguous() if dtype is torch.int8 else copy


def stored_like(param: Tensor, value: Tensor) -> Tensor:
    """Return a whole tensor, or one with other placements, stored like a parameter. DTensors may be sent."""
    if not is_dtensor(param):
        return value
    if is_dtensor(value):
        return value.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined, no-any-return]
    from hf_muon.storage.dtensor import sharded_like

    return sharded_like(param, value)  # type: ignore[arg-type]
