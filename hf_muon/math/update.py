"""The elementwise half of the rule, as pure functions: right on any piece of a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Elements that AdamW steps at once on a CPU: what it makes of them on the way stays in a cache.
_ADAMW_ELEMENTS = 2**18

ADJUST_LR_FNS = ("match_rms_adamw", "original", "rms_to_rms")


def lr_scale(adjust_lr_fn: str, shape: Sequence[int]) -> float:
    """What the learning rate of a matrix is multiplied by; ``shape`` is the whole matrix's ``(..., out, in)``.

    ``match_rms_adamw`` is Moonlight's (https://arxiv.org/abs/2502.16982), ``original`` Keller Jordan's
    (https://kellerjordan.github.io/posts/muon/), ``rms_to_rms`` the spectral condition's
    (https://arxiv.org/abs/2310.17813).
    """
    rows, columns = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    if adjust_lr_fn == "rms_to_rms":
        return math.sqrt(rows / columns)
    raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is not valid. Valid: {', '.join(ADJUST_LR_FNS)}")


def apply_directions_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    scales: Sequence[float],
) -> None:
    """Decoupled weight decay, then ``param -= lr * scale * direction``. Half precision parameters are rounded once.

    The directions are used up: their memory is written to.
    """
    full: list[int] = []
    half: list[int] = []
    for i, param in enumerate(params):
        (half if param.dtype.itemsize < 4 else full).append(i)
    if full:
        whole = [params[i] for i in full]
        moves = [directions[i].to(params[i]) for i in full]  # from where they were computed to where they are stored
        torch._foreach_mul_(moves, [-lr * scales[i] for i in full])
        if weight_decay:
            torch._foreach_mul_(whole, 1 - lr * weight_decay)
        torch._foreach_add_(whole, moves)
    for i in half:
        exact = params[i].float().mul_(1 - lr * weight_decay)
        params[i].copy_(exact.add_(directions[i].to(exact.device), alpha=-lr * scales[i]))


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
    """torch's own functional AdamW: its fused kernel on accelerators, torch's own choice elsewhere.

    On a CPU the fused kernel rounds the last elements of a tensor otherwise, and so tensors that are cut would not have
    the bits of whole ones. There large tensors are stepped piece by piece, which takes little memory besides.
    """
    given = (params, grads, exp_avgs, exp_avg_sqs, steps)
    pieces = [piece for each in zip(*given, strict=True) for piece in _pieces(*each)]
    params, grads, exp_avgs, exp_avg_sqs, steps = ([piece[i] for piece in pieces] for i in range(len(given)))
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


def _pieces(*given: Tensor) -> list[tuple[Tensor, ...]]:
    """A parameter, its gradient, its moments and its step counter, cut into equal pieces."""
    *tensors, step = given
    if tensors[0].device.type != "cpu" or not all(tensor.is_contiguous() for tensor in tensors):
        return [given]
    cut = zip(*(torch.split(tensor.view(-1), _ADAMW_ELEMENTS) for tensor in tensors), strict=True)
    # Each piece counts the step, and the counter itself does so once.
    return [(*piece, step.clone() if k else step) for k, piece in enumerate(cut)]


def uses_fused_adamw(params: Sequence[Tensor]) -> bool:
    """Whether torch's fused AdamW kernel serves these parameters; its step counters live on the device then."""
    return all(param.device.type in ("cuda", "xpu") and param.is_floating_point() for param in params)
