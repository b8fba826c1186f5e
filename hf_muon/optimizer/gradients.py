"""Gradients before a step: whether they fit their parameters, and hold numbers that a step can compute with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.math.momentum import update_dtype
from hf_muon.optimizer import state as checkpoint
from hf_muon.storage.tensors import STEPPED_DTYPES, class_complaint, has_data, is_dtensor, local_of

Group = Mapping[str, Any]
State = Mapping[Tensor, Mapping[str, Any]]

NOT_FINITE = (
    "\nSuch gradients come from a diverged loss (lower the learning rate), from bad input, or from fp16 without a "
    "GradScaler."
)


def local_grad(param: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient, stored as the parameter is; zeros where it has none.

    A gradient with other placements (tensor parallel embeddings and norms have such) is redistributed first.
    """
    grad = param.grad
    if grad is None:
        return torch.zeros_like(local_of(param))
    if is_dtensor(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return local_of(grad)


def complaint(group: Group, param: Tensor) -> str | None:
    """Say why a parameter's gradient does not fit it; None where it does, or where there is none."""
    grad = param.grad
    if grad is None:
        return None
    if words := class_complaint(param):  # one that was frozen when its storage was looked at
        return words
    if grad.layout != torch.strided:
        return "has a sparse gradient; build its embedding with sparse=False"
    if is_dtensor(grad) != is_dtensor(param):
        kinds = ["a DTensor" if is_dtensor(tensor) else "a plain tensor" for tensor in (param, grad)]
        return f"is {kinds[0]}, and its gradient {kinds[1]}: it was wrapped after the backward pass"
    if is_dtensor(grad) and grad.device_mesh != param.device_mesh:  # type: ignore[attr-defined]
        return f"has a gradient on another mesh, {grad.device_mesh}"  # type: ignore[attr-defined]
    if grad.shape != param.shape:
        return f"has a gradient of shape {tuple(grad.shape)}: it was resized after the backward pass"
    if local_of(grad).device != local_of(param).device:
        return f"is stored on {local_of(param).device}, and its gradient on {local_of(grad).device}"
    if grad.dtype not in STEPPED_DTYPES:
        return f"has a gradient of dtype {grad.dtype}; Muon and AdamW take {_names(STEPPED_DTYPES)}"
    if not group["use_muon"] and grad.dtype != param.dtype:
        return (
            f"is stored in {param.dtype}, and its gradient in {grad.dtype}; torch's AdamW needs them alike. Convert "
            "it before the step: param.grad = param.grad.to(param.dtype)"
        )
    return None


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def flags(groups: Sequence[Group], state: State, *, may_be_idle: bool) -> Tensor:
    """Return ``(2,)`` int64, not read from the device: any entry that cannot be stepped; any that is not zero.

    Args:
        groups: param groups.
        state: of their parameters.
        may_be_idle: whether to look for the second one, which is 1 otherwise.
    """
    buckets: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = {}
    unread = False
    for group, param in _with_gradient(groups):
        grad = local_of(param.grad)  # type: ignore[arg-type]
        if not has_data(grad):
            unread = True
        elif grad.numel():
            buckets.setdefault((grad.device, grad.dtype, largest(group, param, state.get(param))), []).append(grad)
    bad = _any([_too_large(grads, limit) for (_, _, limit), grads in buckets.items()])
    if unread or not may_be_idle:
        return torch.cat([bad, torch.ones_like(bad)])
    return torch.cat([bad, _any([grad.any() for grads in buckets.values() for grad in grads])])


def _with_gradient(groups: Sequence[Group]) -> list[tuple[Group, Tensor]]:
    return [(group, param) for group in groups for param in group["params"] if param.grad is not None]


def largest(group: Group, param: Tensor, moments: Mapping[str, Any] | None = None) -> float:
    """Return the largest magnitude of a gradient with which every moment of its parameter stays finite.

    Momentum moves by the difference of two gradients; a quarter leaves room for rounding. AdamW's second moment becomes
    ``beta2 * exp_avg_sq + (1 - beta2) * grad**2``, computed in fp32 for half precision. In fp16 it leaves room for a
    few large gradients, not for many: there, `exp_avg_sq` is read on a CPU. On an accelerator each would be waited for.

    Args:
        group: of the parameter.
        param: that has a gradient.
        moments: its state; None before the first step.
    """
    if group["use_muon"]:
        return torch.finfo(update_dtype(param, group.get("momentum_dtype", "auto"))).max / 4
    kept = torch.finfo(param.dtype).max
    if param.dtype is not torch.float16:
        return 0.99 * math.sqrt(kept)
    decay = group["adamw_betas"][1]
    held = local_of(moments["exp_avg_sq"]) if moments and "exp_avg_sq" in moments else None
    at_hand = held is not None and held.device.type == "cpu" and held.numel() and has_data(held)
    height = float(held.max()) if held is not None and at_hand else 0.0
    # However high it stands, an average does not rise beyond what it is an average of.
    room = max(0.99 * kept - decay * height, 0.9 * (1 - decay) * kept)
    return 0.99 * min(kept / 4, math.sqrt(room / (1 - decay)))


def _too_large(grads: list[Tensor], limit: float) -> Tensor:
    """Return a flag: whether any entry is NaN, or larger than the limit."""
    # The 2-norm is the faster one on a CPU, but gradients within the limit may have one that is not.
    if grads[0].device.type == "cpu" and _all_within(torch._foreach_norm(grads), limit):
        return torch.zeros((), dtype=torch.bool)
    return _all_within(torch._foreach_norm(grads, float("inf")), limit).logical_not()


def _all_within(norms: Sequence[Tensor], limit: float) -> Tensor:
    wide = torch.promote_types(norms[0].dtype, torch.float32)
    return (torch.stack(list(norms)).to(wide) <= limit).all()  # false for NaN


def _any(bits: Sequence[Tensor]) -> Tensor:
    if not bits:
        return torch.zeros(1, dtype=torch.int64)
    return torch.stack([bit.to(bits[0].device) for bit in bits]).any().to(torch.int64).reshape(1)


def bad_names(groups: Sequence[Group], state: State) -> list[str]:
    """Name the parameters whose gradients cannot be stepped, each with what it holds."""
    stepped = [(g, p) for g, p in _with_gradient(groups) if local_of(p.grad).numel() and has_data(local_of(p.grad))]  # type: ignore[arg-type]
    seen = {p: _seen(local_of(p.grad), largest(g, p, state.get(p))) for g, p in stepped}  # type: ignore[arg-type]
    endless = [param for param, words in seen.items() if words == _ENDLESS]
    if len(endless) == len(stepped) > 1:
        everything = f"every parameter (clipping by a norm that is not finite spreads it), {len(stepped)} in all,"
        return [f"{everything} {_ENDLESS}"]
    return [
        f"{checkpoint.describe(group, i)} {words}"
        for group in groups
        for i, param in enumerate(group["params"])
        if (words := seen.get(param))
    ]


_ENDLESS = "has a gradient that is not finite"


def _seen(grad: Tensor, limit: float) -> str | None:
    norm = float(torch.linalg.vector_norm(grad, float("inf")))
    if not math.isfinite(norm):
        return _ENDLESS
    if norm > limit:
        return f"has a gradient as large as {norm:.2g}; above {limit:.2g} its moments would overflow"
    return None
