"""AdamW's step, elementwise: correct on any piece of a parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hf_muon.math.elementwise import Elementwise, Number, is_accelerator, over
from hf_muon.math.moments import BLOCK, MOMENTS, moment_dtype, over_blocks
from hf_muon.math.rounding import is_half, salt, store_

# Elements per chunk on a CPU, so that the temporaries of torch's AdamW stay in a cache.
CHUNK = 2**18
MOMENTS_OF_ADAMW = ("exp_avg", "exp_avg_sq")
_AVERAGE, _SQUARE = (MOMENTS[key] for key in MOMENTS_OF_ADAMW)


class Stepped(NamedTuple):
    """A parameter, or a chunk of one, with its gradient and its state, for AdamW; local tensors."""

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]


def _step(
    param: Tensor,  # any dtype; flat, or with blocks of codes (R, BLOCK)
    grad: Tensor,  # the same shape
    average: tuple[Tensor, ...],  # the first moment in the same shape, or its codes and their scales (R,)
    square: tuple[Tensor, ...],  # the second one
    step_salt: int | Tensor,
    rate: Number,  # 1 - beta1
    decay: Number,  # beta2
    rest: Number,  # 1 - beta2
    keep: Number,  # 1 - lr * weight_decay
    size: Number,  # lr / (1 - beta1**t)
    root: Number,  # 1 / sqrt(1 - beta2**t)
    eps: Number,
    *,
    stochastic: bool,  # whether the parameter is rounded at random
) -> None:
    """Step a parameter and its moments in fp32, or in the dtype of a wider parameter."""
    # bf16 has 8 significant bits, which would lose most of a gradient in an average.
    dtype = torch.promote_types(param.dtype, torch.float32)
    grad, first, second = grad.to(dtype), _AVERAGE.read(*average).to(dtype), _SQUARE.read(*square).to(dtype)
    # Not lerp_, addcmul_ and addcdiv_, which round differently: operations that round once each are the same bits
    # compiled or not.
    first = (grad - first).mul_(rate).add_(first)
    second = (grad * grad).mul_(rest).add_(second * decay)
    move = first / second.sqrt().mul_(root).add_(eps)
    exact = (param.to(dtype) * keep).sub_(move.mul_(size))
    # Low precision is rounded at random: to nearest, a slow second moment would stop.
    _AVERAGE.write_(first, step_salt, *average)
    _SQUARE.write_(second, step_salt, *square)
    store_(param, exact, first, step_salt, stochastic=stochastic)


def _step_values(param: Tensor, grad: Tensor, average: Tensor, square: Tensor, *numbers: Any, stochastic: bool) -> None:
    _step(param, grad, (average,), (square,), *numbers, stochastic=stochastic)


def _step_codes(
    param: Tensor,
    grad: Tensor,
    average: Tensor,
    average_scales: Tensor,
    square: Tensor,
    square_scales: Tensor,
    *numbers: Any,
    stochastic: bool,
) -> None:
    _step(param, grad, (average, average_scales), (square, square_scales), *numbers, stochastic=stochastic)


STEP = Elementwise(_step_values, reads=(0, 1, 2, 3), writes=(0, 2, 3), name="step")
STEP_CODES = Elementwise(_step_codes, reads=(0, 1, 2, 3, 4, 5), writes=(0, 2, 3, 4, 5), row=BLOCK, by_row=(3, 5))


def adamw_(
    stepped: Sequence[Stepped],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int = 0,
    rounding: str = "auto",
) -> None:
    """Step with torch's functional AdamW if all tensors have one dtype of at least 32 bits, and else with `STEP`.

    torch's AdamW is the fused kernel if step counters are on an accelerator. On a CPU that kernel rounds the last
    elements of a tensor differently, so that sharded tensors would not be bit-identical to whole ones: there its
    other implementation is used, in chunks, which needs little temporary memory.

    bf16 and fp16 parameters, and moments in bf16 or 8 bits, are computed in fp32 and rounded once.

    Args:
        stepped: parameters, each with a state of `step`, which is incremented, and of moments.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        step: number of the param group's step, which seeds stochastic rounding.
        rounding: `weight_rounding` of the param group.
    """
    for_step: list[Stepped] = []
    for_torch: list[Stepped] = []
    for item in stepped:
        if _is_for_torch(item):
            for_torch += _chunks(item) if item.param.device.type == "cpu" else [item]
        else:
            for_step.append(item)
    if for_torch:
        adamw(
            [item.param for item in for_torch],
            [item.grad for item in for_torch],
            [item.state["exp_avg"] for item in for_torch],
            [item.state["exp_avg_sq"] for item in for_torch],
            [],
            [item.state["step"] for item in for_torch],
            foreach=None,
            fused=True if all(item.state["step"].device.type != "cpu" for item in for_torch) else None,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
    # Bias corrections are numbers of a call, so parameters with the same count share one.
    by_count: dict[float, list[Stepped]] = {}
    if for_step:
        torch._foreach_add_([item.state["step"] for item in for_step], 1)
    for item in for_step:
        by_count.setdefault(float(item.state["step"]), []).append(item)
    for count, alike in by_count.items():
        corrections = [1 - beta**count for beta in betas]
        rates = (1 - betas[0], betas[1], 1 - betas[1])
        factors = (1 - lr * weight_decay, lr / corrections[0], 1 / math.sqrt(corrections[1]), eps)
        numbers, stochastic = (salt(step), *rates, *factors), rounding != "nearest"
        tensors = [_tensors(item) for item in alike]
        if rows := [row for row in tensors if len(row) == 4]:
            over(STEP, [*zip(*rows, strict=True)], *numbers, stochastic=stochastic)
        if rows := [row for row in tensors if len(row) == 6]:
            over_blocks(STEP_CODES, [*zip(*rows, strict=True)], *numbers, stochastic=stochastic)


def _is_for_torch(stepped: Stepped) -> bool:
    """Return whether torch's AdamW steps a parameter: all in its dtype, on an accelerator by the fused kernel."""
    param, state = stepped.param, stepped.state
    alike = all(other.dtype is param.dtype for other in (stepped.grad, *(state[key] for key in MOMENTS_OF_ADAMW)))
    on_host = state["step"].device.type == "cpu"
    return alike and not is_half(param) and not (on_host and is_accelerator(param.device))


def _tensors(stepped: Stepped) -> list[Tensor]:
    """Return a parameter, its gradient and its moments, each of 8 bits followed by its scales."""
    keys = [key for moment in MOMENTS_OF_ADAMW for key in (moment, MOMENTS[moment].scale) if key in stepped.state]
    return [stepped.param.detach(), stepped.grad, *(stepped.state[key] for key in keys)]


def _chunks(stepped: Stepped) -> list[Stepped]:
    """Cut a parameter, its gradient and its moments into chunks of `CHUNK` elements, each with a step counter."""
    tensors = [stepped.param, stepped.grad, *(stepped.state[key] for key in MOMENTS_OF_ADAMW)]
    if stepped.param.numel() <= CHUNK or not all(tensor.is_contiguous() for tensor in tensors):
        return [stepped]
    splits = [torch.split(tensor.view(-1), CHUNK) for tensor in tensors]
    # AdamW increments the counter of each chunk. The parameter's must be incremented once: it is that of the first.
    step = stepped.state["step"]
    steps = [step, *(step.clone() for _ in splits[0][1:])]
    return [
        Stepped(param, grad, {"step": count, **dict(zip(MOMENTS_OF_ADAMW, moments, strict=True))})
        for count, param, grad, *moments in zip(steps, *splits, strict=True)
    ]


def uses_fused_adamw(params: Sequence[Tensor], state_dtype: str = "auto") -> bool:
    """Return whether torch's fused AdamW kernel steps these parameters; it needs step counters on their device.

    The kernel steps the meta device too, so that its launches can be counted.

    Args:
        params: all parameters of a param group.
        state_dtype: the option for the dtype of their moments; the kernel supports only that of the parameter.
    """
    return all(
        param.device.type in ("cuda", "xpu", "meta")
        and param.is_floating_point()
        and not is_half(param)
        and moment_dtype(param, "exp_avg", state_dtype) is param.dtype
        for param in params
    )
