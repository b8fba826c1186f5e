"""AdamW's step, elementwise: correct on any piece of a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hf_muon.math.codes import BLOCK, FOURTH_POWERS, SQUARES, check_blocks, codes_of
from hf_muon.math.elementwise import Elementwise, Number, is_accelerator, is_large, most_copied, over, padded_rows
from hf_muon.math.moments import MOMENTS, decoded, moment_dtype
from hf_muon.math.rounding import Observer, Salt, is_half, round_to_half, salt, salted_bf16, salted_bits

# Elements per chunk on a CPU, so that the temporaries of torch's AdamW stay in a cache.
CHUNK = 2**18
MOMENTS_OF_ADAMW = ("exp_avg", "exp_avg_sq")


class Stepped(NamedTuple):
    """What AdamW steps: a parameter, or a chunk of one, with its gradient and its state; local tensors."""

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]


def next_values(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rates: Sequence[Number],
    factors: Sequence[Number],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a parameter and its moments after a step, in the dtype of the step.

    Args:
        param, grad, exp_avg, exp_avg_sq: flat, in any dtypes.
        rates: by which the first moment moves; the decay of the second one, and one minus it.
        factors: of the parameter, ``1 - lr * weight_decay``; of the update, ``lr`` over the first bias correction; of
            the square root of the second moment, one over that of its bias correction; and `eps`.
    """
    dtype = torch.promote_types(param.dtype, torch.float32)
    grad, first, second = grad.to(dtype), exp_avg.to(dtype), exp_avg_sq.to(dtype)
    first = (grad - first).mul_(rates[0]).add_(first)
    second = (grad * grad).mul_(rates[2]).add_(second * rates[1])
    move = first / second.sqrt().mul_(factors[2]).add_(factors[3])
    return (param.to(dtype) * factors[0]).sub_(move.mul_(factors[1])), first, second


def _step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Number,
    decay: Number,
    rest: Number,
    keep: Number,
    size: Number,
    root: Number,
    eps: Number,
    step_salt: Salt,
    *,
    stochastic: bool,
) -> None:
    """Step a parameter and its moments; the numbers are those of `next_values`."""
    exact, *moments = next_values(param, grad, exp_avg, exp_avg_sq, (rate, decay, rest), (keep, size, root, eps))
    for stored, moment in zip((exp_avg, exp_avg_sq), moments, strict=True):
        stored.copy_(salted_bf16(moment.float(), step_salt) if stored.dtype is torch.bfloat16 else moment)
    if is_half(param) and stochastic:
        exact = round_to_half(exact, salted_bits(exact, step_salt, moments[0]), param.dtype)
    param.copy_(exact)


STEP = Elementwise(_step, reads=(0, 1, 2, 3), writes=(0, 2, 3))


def _step_codes(
    param: Tensor,
    grad: Tensor,
    avg_codes: Tensor,
    avg_scales: Tensor,
    sq_codes: Tensor,
    sq_scales: Tensor,
    rate: Number,
    decay: Number,
    rest: Number,
    keep: Number,
    size: Number,
    root: Number,
    eps: Number,
    step_salt: Salt,
    *,
    stochastic: bool,
) -> None:
    """Step a parameter in blocks ``(R, BLOCK)`` and its moments of 8 bits; the numbers are those of `next_values`."""
    check_blocks(avg_codes)
    exp_avg = SQUARES.fractions(avg_codes) * avg_scales.unsqueeze(-1)
    exp_avg_sq = FOURTH_POWERS.fractions(sq_codes) * sq_scales.unsqueeze(-1)
    exact, first, second = next_values(param, grad, exp_avg, exp_avg_sq, (rate, decay, rest), (keep, size, root, eps))
    for codes, scales, moment, code in (
        (avg_codes, avg_scales, first, SQUARES),
        (sq_codes, sq_scales, second, FOURTH_POWERS),
    ):
        stored, largest = codes_of(moment.float(), code, step_salt)
        codes.copy_(stored)
        scales.copy_(largest.squeeze(-1))
    if is_half(param) and stochastic:
        exact = round_to_half(exact, salted_bits(exact, step_salt, first), param.dtype)
    param.copy_(exact)


STEP_CODES = Elementwise(_step_codes, reads=(0, 1, 2, 3, 4, 5), writes=(0, 2, 3, 4, 5), row=BLOCK)


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
    """Step with torch's functional AdamW where all tensors have one dtype of at least 32 bits, and else with `STEP`.

    torch's AdamW is the fused kernel where step counters are on an accelerator. On a CPU that kernel rounds the last
    elements of a tensor differently, so that sharded tensors would not be bit-identical to whole ones: there it takes
    its other form, in chunks, which needs little temporary memory.

    bf16 and fp16 parameters, and moments in bf16 or 8 bits, are computed in fp32 and rounded once.

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
    others: list[Stepped] = []
    chunked: list[Stepped] = []
    for own in stepped:
        if _is_for_torch(own):
            chunked += chunks(own, _cpu_chunk(own.param))
        else:
            others.append(own)
    if chunked:
        adamw(
            [own.param for own in chunked],
            [own.grad for own in chunked],
            [own.state["exp_avg"] for own in chunked],
            [own.state["exp_avg_sq"] for own in chunked],
            [],
            [own.state["step"] for own in chunked],
            foreach=None,
            fused=True if all(own.state["step"].device.type != "cpu" for own in chunked) else None,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
    if others:
        _step_others_(others, lr, betas, eps, weight_decay, step, rounding, observer)


def _is_for_torch(stepped: Stepped) -> bool:
    """Return whether torch's AdamW steps a parameter: all in its dtype, on an accelerator by the fused kernel."""
    param, state = stepped.param, stepped.state
    alike = all(other.dtype is param.dtype for other in (stepped.grad, *(state[key] for key in MOMENTS_OF_ADAMW)))
    on_host = state["step"].device.type == "cpu"
    return alike and not is_half(param) and not (on_host and is_accelerator(param.device))


def _step_others_(
    stepped: Sequence[Stepped],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    rounding: str,
    observer: Observer | None,
) -> None:
    """Step parameters with `STEP` or `STEP_CODES`, in few launches."""
    by_count: dict[float, list[Stepped]] = {}
    torch._foreach_add_([own.state["step"] for own in stepped], 1)
    for own in stepped:
        by_count.setdefault(float(own.state["step"]), []).append(own)
    for count, alike in by_count.items():
        corrections = [1 - beta**count for beta in betas]
        rates = (1 - betas[0], betas[1], 1 - betas[1])
        factors = (1 - lr * weight_decay, lr / corrections[0], 1 / math.sqrt(corrections[1]), eps)
        numbers = [*rates, *factors, salt(step)]
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
        most = most_copied(each, param.device)
        if all(column.is_contiguous() for column in columns):
            columns = [column.view(-1, column.shape[-1]) for column in columns]
            if param.shape[-1] % BLOCK == 0 and is_large(2 * each * param.numel(), param.device):
                yield [columns]
                continue
        else:
            most = param.numel()
        for part in _split_rows(columns, most):
            alike = not parts or [tensor.dtype for tensor in part] == [tensor.dtype for tensor in parts[0]]
            if parts and (not alike or count + part[0].numel() > most_copied(each, part[0].device)):
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


def _step_rows_(parts: Sequence[Sequence[Tensor]], *numbers: float, stochastic: bool) -> None:
    """Step rows with moments of 8 bits in one call, copied where blocks are not full or there are several parts."""
    columns = [padded_rows(column, 1 if c in (3, 5) else BLOCK) for c, column in enumerate(zip(*parts, strict=True))]
    flats = [column.gathered() for column in columns]
    blocks = [flat if c in (3, 5) else flat.view(-1, BLOCK) for c, flat in enumerate(flats)]
    STEP_CODES(*blocks, *numbers, stochastic=stochastic)
    for c in STEP_CODES.writes:
        columns[c].scatter(flats[c])


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
