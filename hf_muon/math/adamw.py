"""AdamW's step, elementwise: correct on any piece of a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hf_muon.math import weight_rounding
from hf_muon.math.codes import Quantized
from hf_muon.math.moments import MOMENTS, decoded
from hf_muon.math.rounding import batched, chunk_size, store_bf16_
from hf_muon.math.weight_rounding import Observer, Result, is_half

# Elements per chunk on a CPU, so that AdamW's temporaries stay in a cache.
CHUNK = 2**18
MOMENTS_OF_ADAMW = ("exp_avg", "exp_avg_sq")


class Stepped(NamedTuple):
    """What AdamW steps: a parameter, or a chunk of one, with its gradient and its state; local tensors."""

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]


def adamw_(
    stepped: Sequence[Stepped],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int = 0,
    rounding: str = "auto",
    observer: Observer | None = None,
) -> None:
    """Step with torch's functional AdamW: its fused kernel on accelerators, torch's default elsewhere.

    On a CPU the fused kernel rounds the last elements of a tensor differently, so that sharded tensors would not be
    bit-identical to whole ones. There large tensors are stepped in chunks, which needs little temporary memory.

    bf16 and fp16 parameters, and moments in bf16 or 8 bits, are computed in fp32 and rounded once. Gradients in another
    dtype than their parameter's are converted to the dtype of the computation.

    Args:
        stepped: parameters, each with a state of `step`, which is incremented, and of moments.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        step: number of the param group's step, which seeds stochastic rounding.
        rounding: `weight_rounding` of the param group.
        observer: of what is rounded.
    """

    def torch_adamw(chunks: Sequence[Stepped]) -> None:
        params, grads = [own.param for own in chunks], [own.grad for own in chunks]
        adamw(
            params,
            grads,
            [own.state["exp_avg"] for own in chunks],
            [own.state["exp_avg_sq"] for own in chunks],
            [],
            [own.state["step"] for own in chunks],
            foreach=None,
            fused=True if uses_fused_adamw(params) else None,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )

    exact = [own for own in stepped if not _is_rounded(own)]
    if exact:
        torch_adamw([chunk for own in exact for chunk in chunks(own, _cpu_chunk(own.param))])
    rounded = (chunk for own in stepped if _is_rounded(own) for chunk in chunks(own, chunk_size(own.param)))
    for batch in batched(rounded, lambda chunk: chunk.param):
        in_fp32 = [_in_fp32(own) for own in batch]
        torch_adamw(in_fp32)
        for own, new in zip(batch, in_fp32, strict=True):
            for key in MOMENTS_OF_ADAMW:
                _store_rounded_(own.state, key, new.state[key], step)
        results = [
            Result(own.param, new.param, new.state["exp_avg"])
            for own, new in zip(batch, in_fp32, strict=True)
            if is_half(own.param)
        ]
        weight_rounding.store_(results, rounding, step, observer)


def _is_rounded(stepped: Stepped) -> bool:
    """Return whether weights, gradients or moments are computed in another dtype than they are stored in."""
    dtype, others = stepped.param.dtype, (stepped.grad, *(stepped.state[key] for key in MOMENTS_OF_ADAMW))
    return is_half(stepped.param) or any(other.dtype is not dtype for other in others)


def _in_fp32(stepped: Stepped) -> Stepped:
    """Return the tensors in fp32, or in the dtype of a wider parameter; those that have it already are not copied."""
    dtype = torch.promote_types(stepped.param.dtype, torch.float32)
    moments = {key: decoded(stepped.state, key).to(dtype) for key in MOMENTS_OF_ADAMW}
    return Stepped(stepped.param.to(dtype), stepped.grad.to(dtype), {"step": stepped.state["step"], **moments})


def _store_rounded_(state: Mapping[str, Tensor], key: str, values: Tensor, step: int) -> None:
    """Store a moment, rounded at random where it has fewer bits than its values."""
    stored, (scale, code) = state[key], MOMENTS[key]
    if scale in state:
        if values.numel():
            Quantized(stored, state[scale], code).store_rounded_(values.float(), step)
    elif stored.dtype is torch.bfloat16:
        store_bf16_(stored, values.float(), step)
    elif stored is not values:
        stored.copy_(values)


def _cpu_chunk(param: Tensor) -> int:
    return CHUNK if param.device.type == "cpu" else max(1, param.numel())


def chunks(stepped: Stepped, size: int) -> list[Stepped]:
    """Cut a parameter, its gradient and its state into chunks of about some elements, each with a step counter."""
    tensors = {key: value for key, value in stepped.state.items() if key != "step"}
    together = [stepped.param, stepped.grad, *tensors.values()]
    if not stepped.param.numel() or not all(tensor.is_contiguous() for tensor in together):
        return [stepped]
    if tensors.keys() <= {*MOMENTS_OF_ADAMW}:
        parts = [torch.split(tensor.view(-1), size) for tensor in together]
    else:  # rows, which blocks of codes do not cross
        columns = stepped.param.shape[-1]
        rows = max(1, size // max(1, columns))
        parts = [torch.split(tensor.view(-1, tensor.shape[-1]), rows) for tensor in together]
    # AdamW increments the counter of each chunk, and the parameter's own must be incremented once.
    step = stepped.state["step"]
    steps = [step, *(step.clone() for _ in parts[0][1:])]
    return [
        Stepped(param, grad, {"step": count, **dict(zip(tensors, moments, strict=True))})
        for count, param, grad, *moments in zip(steps, *parts, strict=True)
    ]


def uses_fused_adamw(params: Sequence[Tensor]) -> bool:
    """Return whether torch's fused AdamW kernel steps these parameters; it needs step counters on their device."""
    return all(param.device.type in ("cuda", "xpu") and param.is_floating_point() for param in params)
