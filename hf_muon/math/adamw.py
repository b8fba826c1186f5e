"""AdamW's step, elementwise: correct on any piece of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hf_muon.math import weight_rounding
from hf_muon.math.rounding import chunk_size, store_bf16_
from hf_muon.math.weight_rounding import Observer, Result, is_half

ADAMW_STATE_DTYPES = ("auto", "fp32", "bf16")
# Elements per chunk on a CPU, so that AdamW's temporaries stay in a cache.
CHUNK = 2**18


class Stepped(NamedTuple):
    """What AdamW steps: a parameter, or a chunk of one, with its gradient and its state; local tensors."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


def moment_dtype(param: Tensor, adamw_state_dtype: str = "auto") -> torch.dtype:
    """Return the dtype in which the moments of a parameter are stored.

    It is fp32 for bf16 and fp16 parameters too: with a beta2 of 0.999, a second moment of 8 significant bits that is
    rounded to nearest stops at a third of its value.
    """
    if adamw_state_dtype == "bf16":
        return torch.bfloat16
    return torch.promote_types(param.dtype, torch.float32) if adamw_state_dtype == "auto" else torch.float32


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

    bf16 and fp16 parameters, and bf16 moments, are computed in fp32 and rounded once.

    Args:
        stepped: parameters; their `step` counters are incremented.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        step: number of the param group's step, which seeds stochastic rounding.
        rounding: `weight_rounding` of the param group.
        observer: of what is rounded.
    """

    def torch_adamw(chunks: Sequence[Stepped]) -> None:
        params, grads, exp_avgs, exp_avg_sqs, steps = (list(tensors) for tensors in zip(*chunks, strict=True))
        adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
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

    direct = [own for own in stepped if _needs_no_rounding(own)]
    if direct:
        torch_adamw([chunk for own in direct for chunk in _chunks(own, _cpu_chunk(own.param))])
    for batch in _batches([own for own in stepped if not _needs_no_rounding(own)]):
        exact = [_in_fp32(own) for own in batch]
        torch_adamw(exact)
        for own, new in zip(batch, exact, strict=True):
            for moment, value in ((own.exp_avg, new.exp_avg), (own.exp_avg_sq, new.exp_avg_sq)):
                if moment.dtype is torch.bfloat16:
                    store_bf16_(moment, value.float(), step)
                elif moment is not value:
                    moment.copy_(value)
        results = [
            Result(own.param, new.param, new.exp_avg)
            for own, new in zip(batch, exact, strict=True)
            if is_half(own.param)
        ]
        weight_rounding.store_(results, rounding, step, observer)


def _needs_no_rounding(stepped: Stepped) -> bool:
    """Return whether torch's AdamW can step the tensors as they are."""
    return not is_half(stepped.param) and stepped.param.dtype == stepped.exp_avg.dtype == stepped.exp_avg_sq.dtype


def _in_fp32(stepped: Stepped) -> Stepped:
    """Return the tensors in fp32, or in the dtype of a wider parameter; those that have it already are not copied."""
    dtype = torch.promote_types(stepped.param.dtype, torch.float32)
    param, grad, exp_avg, exp_avg_sq = (tensor.to(dtype) for tensor in stepped[:4])
    return Stepped(param, grad, exp_avg, exp_avg_sq, stepped.step)


def _batches(stepped: Sequence[Stepped]) -> Iterator[list[Stepped]]:
    """Yield parameters in batches of about a chunk of elements on one device, which limits temporary memory."""
    batch: list[Stepped] = []
    count = 0
    for own in stepped:
        for chunk in _chunks(own, chunk_size(own.param)):
            is_full = count + chunk.param.numel() > chunk_size(chunk.param)
            if batch and (is_full or batch[0].param.device != chunk.param.device):
                yield batch
                batch, count = [], 0
            batch.append(chunk)
            count += chunk.param.numel()
    if batch:
        yield batch


def _cpu_chunk(param: Tensor) -> int:
    return CHUNK if param.device.type == "cpu" else max(1, param.numel())


def _chunks(stepped: Stepped, size: int) -> list[Stepped]:
    """Cut a parameter, its gradient and its moments into chunks of some elements, each with a step counter."""
    tensors = stepped[:4]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [stepped]
    params, grads, *moments = (torch.split(tensor.view(-1), size) for tensor in tensors)
    # AdamW increments the counter of each chunk, and the parameter's own must be incremented once.
    steps = [stepped.step, *(stepped.step.clone() for _ in params[1:])]
    return [Stepped(*chunk) for chunk in zip(params, grads, *moments, steps, strict=True)]


def uses_fused_adamw(params: Sequence[Tensor]) -> bool:
    """Return whether torch's fused AdamW kernel steps these parameters; it needs step counters on their device."""
    return all(param.device.type in ("cuda", "xpu") and param.is_floating_point() for param in params)
