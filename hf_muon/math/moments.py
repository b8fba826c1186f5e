"""How moments are stored between steps: fp32, bf16 with stochastic rounding, or 8-bit codes with scales.

Everything that a dtype needs is in this file: state keys, dtypes, shapes, decoding and encoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_muon.math.codes import FOURTH_POWERS, SHORTEST, SQUARES, Code, Quantized, scale_shape
from hf_muon.math.elementwise import rows_per_chunk

MOMENT_DTYPES = ("auto", "fp32", "bf16", "int8")


class Moment(NamedTuple):
    """How a moment is stored in 8 bits: the state key of its scales, and its code."""

    scale: str
    code: Code


MOMENTS = {
    "momentum_buffer": Moment("momentum_scale", SQUARES),
    "exp_avg": Moment("exp_avg_scale", SQUARES),
    "exp_avg_sq": Moment("exp_avg_sq_scale", FOURTH_POWERS),
}
"""By state key."""
SCALES = {moment.scale: key for key, moment in MOMENTS.items()}
"""State keys of scales, with those of their moments."""


def is_quantized(dtype: str, shape: Sequence[int]) -> bool:
    """Return whether the moments of a parameter of this shape are stored as codes.

    Args:
        dtype: one of `MOMENT_DTYPES`.
        shape: of the whole parameter.
    """
    return dtype == "int8" and len(shape) >= 2 and shape[-1] >= SHORTEST


def with_scales(keys: Sequence[str], dtype: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Return state keys of a parameter of this shape, each moment with that of its scales where it has any."""
    if not is_quantized(dtype, shape):
        return tuple(keys)
    return tuple(own for key in keys for own in ((key, MOMENTS[key].scale) if key in MOMENTS else (key,)))


def moment_dtype(param: Tensor, key: str, dtype: str = "auto", shape: Sequence[int] | None = None) -> torch.dtype:
    """Return the dtype of the state under a key of `MOMENTS` or `SCALES`.

    It is fp32 for bf16 and fp16 parameters too: bf16 has 8 significant bits, which would lose most of a gradient, and
    with which AdamW's second moment, rounded to nearest, stops at a third of its value.

    Args:
        param: the parameter.
        key: of the state.
        dtype: one of `MOMENT_DTYPES`.
        shape: of the whole parameter, if `param` is a shard.
    """
    if key in SCALES:
        return torch.float32
    if is_quantized(dtype, param.shape if shape is None else shape):
        return MOMENTS[key].code.dtype
    if dtype == "bf16":
        return torch.bfloat16
    return torch.float32 if dtype == "int8" else torch.promote_types(param.dtype, torch.float32)


def state_shape(key: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the state under a key, for a parameter or a shard of this shape."""
    return scale_shape(shape) if key in SCALES else tuple(shape)


def moment_bytes(param: Tensor, key: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a moment of a parameter, or of a shard of it of this shape, with its scales."""
    nbytes = math.prod(shape) * moment_dtype(param, key, dtype).itemsize
    return nbytes + 4 * math.prod(scale_shape(shape)) if is_quantized(dtype, param.shape) else nbytes


def lacks_scales(state: Mapping[str, Tensor], key: str) -> bool:
    """Return whether a moment consists of codes, and their scales are missing."""
    stored = state.get(key)
    is_code = torch.is_tensor(stored) and not stored.dtype.is_floating_point
    return is_code and MOMENTS[key].scale not in state


def decoded(state: Mapping[str, Tensor], key: str) -> Tensor:
    """Return the values that a moment stands for: fp32 from codes, else the stored tensor itself."""
    moment, stored = MOMENTS[key], state[key]
    if moment.scale not in state:
        return stored
    blocks = Quantized(stored.to(moment.code.dtype), state[moment.scale], moment.code)
    return blocks.values() if blocks.codes.numel() else blocks.codes.float()


def decoded_chunks(state: Mapping[str, Tensor], keys: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield the values of moments with equal shapes: those of codes in chunks of rows, which limits memory."""
    if not any(MOMENTS[key].scale in state for key in keys):
        yield {key: state[key] for key in keys}
        return
    tensors = {own: state[own] for key in keys for own in (key, MOMENTS[key].scale)}
    rows = rows_per_chunk(state[keys[0]])
    for parts in zip(*(torch.split(tensor, rows) for tensor in tensors.values()), strict=True):
        chunk = dict(zip(tensors, parts, strict=True))
        yield {key: decoded(chunk, key) for key in keys}


def encode_(state: Mapping[str, Tensor], key: str, values: Tensor) -> None:
    """Write values into a moment of their shape, rounded to nearest."""
    moment, stored = MOMENTS[key], state[key]
    if moment.scale not in state:
        stored.copy_(values)
    elif values.numel():
        Quantized(stored, state[moment.scale], moment.code).store_(values.to(stored.device, torch.float32))
