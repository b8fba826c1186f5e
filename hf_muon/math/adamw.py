"""AdamW's step, elementwise: correct on any piece of a parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Elements per chunk on a CPU, so that AdamW's temporaries stay in a cache.
CHUNK = 2**18


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Step with torch's functional AdamW: its fused kernel on accelerators, torch's default elsewhere.

    On a CPU the fused kernel rounds the last elements of a tensor differently, so that sharded tensors would not be
    bit-identical to whole ones. There large tensors are stepped in chunks, which needs little temporary memory.
    """
    stepped = (params, grads, exp_avgs, exp_avg_sqs, steps)
    chunks = [chunk for tensors in zip(*stepped, strict=True) for chunk in _chunks(*tensors)]
    params, grads, exp_avgs, exp_avg_sqs, steps = ([chunk[i] for chunk in chunks] for i in range(len(stepped)))
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


def _chunks(*tensors_and_step: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut a parameter, its gradient and its moments into chunks, each with a step counter."""
    *tensors, step = tensors_and_step
    if tensors[0].device.type != "cpu" or not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors_and_step]
    chunks = zip(*(torch.split(tensor.view(-1), CHUNK) for tensor in tensors), strict=True)
    # AdamW increments the counter of each chunk, and the parameter's own must be incremented once.
    return [(*chunk, step.clone() if k else step) for k, chunk in enumerate(chunks)]


def uses_fused_adamw(params: Sequence[Tensor]) -> bool:
    """Return whether torch's fused AdamW kernel steps these parameters; it needs step counters on their device."""
    return all(param.device.type in ("cuda", "xpu") and param.is_floating_point() for param in params)
