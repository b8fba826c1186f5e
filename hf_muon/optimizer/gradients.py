"""Checks of gradients before a step: that they fit their parameters, and that moments stay finite with them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.math.elementwise import is_accelerator
from hf_muon.math.momentum import update_dtype
from hf_muon.optimizer.state import describe, dtype_of
from hf_muon.storage.tensors import STEPPED_DTYPES, class_complaint, has_data, is_dtensor, local_of

Group = Mapping[str, Any]


def local_grad(param: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient, stored like the parameter; zeros without a gradient.

    A gradient with other placements, as of tensor parallel embeddings and norms, is redistributed first.
    """
    grad = param.grad
    if grad is None:
        return torch.zeros_like(local_of(param))
    if is_dtensor(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return local_of(grad)


class Gradients:
    """The findings of this rank about the gradients of param groups, in one pass over all parameters.

    Args:
        groups: param groups.
        trained: the ids of parameters that required gradients when their classes were checked.

    Attributes:
        complaints: why gradients do not fit their parameters.
        stored: for each parameter, "" without a gradient; `IN_PLACE` if it can be stored like the parameter without
            communication; else its placements.
    """

    def __init__(self, groups: Sequence[Group], trained: Collection[int] = ()) -> None:
        self.complaints: list[str] = []
        self.stored: list[str] = []
        # By device and dtype: gradients whose values can be read, and the limit of each.
        self._readable: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[float]]] = {}
        self._has_others = False
        for group in groups:
            limits: dict[torch.dtype, float] = {}
            for i, param in enumerate(group["params"]):
                if param.grad is None:
                    self.stored.append("")
                    continue
                text = None if id(param) in trained else class_complaint(param)
                if text := text or complaint(group, param):
                    self.complaints.append(f"{describe(group, i)} {text}")
                    continue
                self.stored.append(_stored(param, param.grad))
                grad = local_of(param.grad)
                if not has_data(grad):
                    self._has_others = True
                elif grad.numel():
                    if param.dtype not in limits:
                        limits[param.dtype] = largest(group, param)
                    grads, limits_of_grads = self._readable.setdefault((grad.device, grad.dtype), ([], []))
                    grads.append(grad)
                    limits_of_grads.append(limits[param.dtype])

    def flags(self, *, may_be_idle: bool) -> list[Tensor]:
        """Return flags, 0-dim bool, still on the device: all entries can be stepped; any of them is not zero.

        Args:
            may_be_idle: whether to compute the second flag; without it there is one.
        """
        steppable = _stacked([_all_small(grads, limits) for grads, limits in self._readable.values()]).all()
        if self._has_others or not may_be_idle:
            return [steppable]
        return [steppable, _stacked([grad.any() for grads, _ in self._readable.values() for grad in grads]).any()]


IN_PLACE = "="


def needs_others(stored: str) -> bool:
    """Return whether a gradient that is stored so takes communication."""
    return stored not in ("", IN_PLACE)


def _stored(param: Tensor, grad: Tensor) -> str:
    if not is_dtensor(grad) or grad.placements == param.placements:  # type: ignore[attr-defined]
        return IN_PLACE
    pairs = zip(grad.placements, param.placements, strict=True)  # type: ignore[attr-defined]
    if all(placement == target or placement.is_replicate() for placement, target in pairs):
        return IN_PLACE
    return str(grad.placements)  # type: ignore[attr-defined]


def complaint(group: Group, param: Tensor) -> str | None:
    """Return why a parameter's gradient does not match the parameter; None if it does."""
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        return "has a sparse gradient; build its embedding with sparse=False [sparse-gradient]"
    if (is_sharded := is_dtensor(grad)) != is_dtensor(param):
        kinds = ["a DTensor" if is_dtensor(tensor) else "a plain tensor" for tensor in (param, grad)]
        return (
            f"is {kinds[0]}, and its gradient {kinds[1]}: it was wrapped after the backward pass "
            "[wrapped-after-backward]"
        )
    if is_sharded and grad.device_mesh != param.device_mesh:  # type: ignore[attr-defined]
        return f"has a gradient on another mesh, {grad.device_mesh} [gradient-mesh]"  # type: ignore[attr-defined]
    if grad.shape != param.shape:
        return f"has a gradient of shape {tuple(grad.shape)}: it was resized after the backward pass [gradient-shape]"
    if local_of(grad).device != local_of(param).device:
        return f"is stored on {local_of(param).device}, and its gradient on {local_of(grad).device} [gradient-device]"
    if grad.dtype not in STEPPED_DTYPES:
        return f"has a gradient of dtype {grad.dtype}; Muon and AdamW take {_names(STEPPED_DTYPES)} [gradient-dtype]"
    return None


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def largest(group: Group, param: Tensor) -> float:
    """Return the largest magnitude of a gradient with which every moment of its parameter stays finite.

    Momentum moves by the difference of two gradients; a quarter of the dtype's range leaves room for rounding. AdamW's
    second moment is an average of squares. Steps compute in fp32 at least.
    """
    if group["use_muon"]:
        return torch.finfo(update_dtype(param, dtype_of(group))).max / 4
    # 0.99 leaves room for rounding, too: the square of the root of a range may exceed it.
    return 0.99 * math.sqrt(torch.finfo(update_dtype(param, dtype_of(group))).max)


def _all_small(grads: list[Tensor], limits: list[float]) -> Tensor:
    """Return a flag: no entry is NaN, or larger than the limit of its gradient."""
    # On a CPU the 2-norm is faster than the maximum, and bounds it; only where it exceeds the limit, take the maximum.
    if not is_accelerator(grads[0].device) and _all_within(grads, limits, 2.0):
        return torch.ones((), dtype=torch.bool, device="cpu")
    return _all_within(grads, limits, float("inf"))


def _all_within(grads: list[Tensor], limits: list[float], order: float) -> Tensor:
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = list(torch._foreach_norm(grads, order, wide))
    torch._foreach_div_(norms, limits)
    # A comparison that is false for NaN.
    return (torch.stack(norms) <= 1).all()


def _stacked(bits: Sequence[Tensor]) -> Tensor:
    if len(bits) == 1:
        return bits[0]
    if not bits:
        return torch.empty(0, dtype=torch.bool, device="cpu")
    return torch.stack([bit.to(bits[0].device) for bit in bits])


def bad_names(groups: Sequence[Group]) -> list[str]:
    """Return the parameters whose gradients cannot be stepped, each with the reason."""
    reasons = [
        (describe(group, i), _too_large_reason(local_of(param.grad), largest(group, param)))
        for group in groups
        for i, param in enumerate(group["params"])
        if param.grad is not None and local_of(param.grad).numel() and has_data(local_of(param.grad))
    ]
    if len(reasons) > 1 and all(reason == _NOT_FINITE for _, reason in reasons):
        everything = f"every parameter (clipping by a norm that is not finite spreads it), {len(reasons)} in all,"
        return [f"{everything} {_NOT_FINITE}"]
    return [f"{name} {reason}" for name, reason in reasons if reason]


_NOT_FINITE = "has a gradient that is not finite [gradient-not-finite]"


def _too_large_reason(grad: Tensor, limit: float) -> str | None:
    norm = float(torch.linalg.vector_norm(grad, float("inf")))
    if not math.isfinite(norm):
        return _NOT_FINITE
    if norm > limit:
        return (
            f"has a gradient as large as {norm:.2g}; above {limit:.2g} its moments would overflow [gradient-too-large]"
        )
    return None
