"""AdamW's step, elementwise: correct on any piece of a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hf_muon.math import weight_rounding
from hf_muon.math.adamw_functions import STEP, STEP_CODES, next_values
from hf_muon.math.codes import BLOCK, Quantized, over_blocks
from hf_muon.math.elementwise import (
    is_accelerator,
    is_large,
    most_copied,
    number,
    over,
    padded_rows,
)
from hf_muon.math.moments import MOMENTS, decoded, moment_dtype
from hf_muon.math.rounding import batched, chunk_size, salt, store_bf16_
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
    """Step with torch's functional AdamW: on accelerators its fused kernel, or `STEP` for dtypes that it does not take.

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
            fused=True if all(own.state["step"].device.type != "cpu" for own in chunks) else None,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )

    together: list[Stepped] = []
    exact: list[Stepped] = []
    rounded: list[Stepped] = []
    for own in stepped:
        (together if _is_together(own) else rounded if _is_rounded(own) else exact).append(own)
    if together:
        _step_together_(together, lr, betas, eps, weight_decay, step, rounding, observer)
    if exact:
        torch_adamw([chunk for own in exact for chunk in chunks(own, _cpu_chunk(own.param))])
    in_chunks = (chunk for own in rounded for chunk in chunks(own, chunk_size(own.param)))
    for batch in batched(in_chunks, lambda chunk: chunk.param):
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


def _is_together(stepped: Stepped) -> bool:
    """Return whether `_step_together_` steps a parameter: on an accelerator, its counter on the CPU."""
    return is_accelerator(stepped.param.device) and stepped.state["step"].device.type == "cpu"


def _step_together_(
    stepped: Sequence[Stepped],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    rounding: str,
    observer: Observer | None,
) -> None:
    """Step parameters on an accelerator whose step counters are on the CPU, in few launches."""
    by_count: dict[float, list[Stepped]] = {}
    torch._foreach_add_([own.state["step"] for own in stepped], 1)
    for own in stepped:
        by_count.setdefault(float(own.state["step"]), []).append(own)
    for count, alike in by_count.items():
        corrections = [1 - beta**count for beta in betas]
        rates = [number(value) for value in (1 - betas[0], betas[1], 1 - betas[1])]
        factors = (1 - lr * weight_decay, lr / corrections[0], 1 / math.sqrt(corrections[1]), eps)
        numbers = [*rates, *map(number, factors), number(salt(step), torch.int32)]
        for own in alike:
            if observer is not None and is_half(own.param):
                first, second = (decoded(own.state, key) for key in MOMENTS_OF_ADAMW)
                observer(own.param, next_values(own.param, own.grad, first, second, numbers[:3], numbers[3:7])[0])
        stochastic = rounding != "nearest"
        columns = [_columns(own) for own in alike if "exp_avg_scale" not in own.state]
        if columns:
            over(STEP, list(zip(*columns, strict=True)), *numbers, stochastic=stochastic)
        quantized = [own for own in alike if "exp_avg_scale" in own.state]
        for parts in _rows_together(quantized):
            _step_rows_(parts, *numbers, stochastic=stochastic)


def _columns(stepped: Stepped) -> list[Tensor]:
    """Return a parameter, its gradient and its moments, each of 8 bits followed by its scales."""
    keys = [key for moment in MOMENTS_OF_ADAMW for key in (moment, MOMENTS[moment].scale) if key in stepped.state]
    return [stepped.param.detach(), stepped.grad, *(stepped.state[key] for key in keys)]


def _rows_together(stepped: Sequence[Stepped]) -> Iterator[list[list[Tensor]]]:
    """Yield lists of parts to step in one call: large parameters whose blocks are full as they are, others in copies.

    A part is the columns of some rows of a parameter, or of all of it.
    """
    parts: list[list[Tensor]] = []
    count = 0
    for own in stepped:
        columns = _columns(own)
        param, grad = columns[:2]
        if not param.numel():
            continue
        each = param.dtype.itemsize + grad.dtype.itemsize + 2
        most = most_copied(each)
        if all(column.is_contiguous() for column in columns):
            columns = [column.view(-1, column.shape[-1]) for column in columns]
            if param.shape[-1] % BLOCK == 0 and is_large(2 * each * param.numel()):
                yield [columns]
                continue
        else:
            most = param.numel()
        for part in _split_rows(columns, most):
            alike = not parts or [tensor.dtype for tensor in part] == [tensor.dtype for tensor in parts[0]]
            if parts and (not alike or count + part[0].numel() > most_copied(each)):
                yield parts
                parts, count = [], 0
            parts.append(part)
            count += part[0].numel()
    if parts:
        yield parts


def _split_rows(columns: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cut columns with equal numbers of rows into parts of about some elements."""
    rows = max(1, size // max(1, columns[0].shape[-1]))
    if columns[0].numel() <= size:
        yield list(columns)
        return
    yield from map(list, zip(*(torch.split(column, rows) for column in columns), strict=True))


def _step_rows_(parts: Sequence[Sequence[Tensor]], *numbers: Tensor, stochastic: bool) -> None:
    """Step rows with moments of 8 bits in one call, copied where blocks are not full or there are several parts."""
    columns = [padded_rows(column, 1 if c in (3, 5) else BLOCK) for c, column in enumerate(zip(*parts, strict=True))]
    flats = [column.gathered() for column in columns]
    blocks = [flat if c in (3, 5) else flat.view(-1, BLOCK) for c, flat in enumerate(flats)]
    over_blocks(STEP_CODES, blocks, *numbers, stochastic=stochastic)
    for c in STEP_CODES.writes:
        columns[c].scatter(flats[c])


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


def uses_fused_adamw(params: Sequence[Tensor], state_dtype: str = "auto") -> bool:
    """Return whether torch's fused AdamW kernel steps these parameters; it needs step counters on their device.

    The kernel steps the meta device too, so that its launches can be counted.

    Args:
        params: of a param group.
        state_dtype: of their moments, as the option has it; the kernel takes those of the parameter's dtype alone.
    """
    return all(
        param.device.type in ("cuda", "xpu", "meta")
        and param.is_floating_point()
        and not is_half(param)
        and moment_dtype(param, "exp_avg", state_dtype) is param.dtype
        for param in params
    )
