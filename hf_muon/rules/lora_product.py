"""`lora: product`, LoRA-Muon: LoRA factors step so that their product moves as Muon would move it.

With ``W = B A``, lora_B ``(out, r)`` and lora_A ``(r, in)``, a step moves B by ``msign(m_B R_A) R_A`` and A by
``R_B msign(R_B m_A)``, half of each, with ``R_A = (A A^T)^(-1/2)`` and ``R_B = (B^T B)^(-1/2)`` from the weights before
the step. The product's step is the same for the factors ``B S^-1`` and ``S A``. Source: Cesista et al.,
https://arxiv.org/abs/2606.12921. Inverse roots are pseudo-inverses without damping: while B is zero, A keeps its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_muon.options import types
from hf_muon.options.declaration import Option
from hf_muon.rules.rule import Options, Rule, States

A, B = "lora_A", "lora_B"
_FACTOR = re.compile(r"((?:^|[._])lora(?:_embedding)?[._])(A|B|a|b|down|up)(?=$|[._])")
_PARTNERS = {"A": ("B", A), "B": ("A", B), "a": ("b", A), "b": ("a", B), "down": ("up", A), "up": ("down", B)}
_LORA = re.compile(r"(?:^|[._])lora[._](?!magnitude)", re.IGNORECASE)


def partner(name: str) -> tuple[str, str] | None:
    """Return the name of a LoRA factor's partner and the factor's own role; None for any other parameter.

    Raises:
        ValueError: the name is that of another LoRA factor, whose product is not known.
    """
    if (factor := _FACTOR.search(name)) is None:
        if _LORA.search(name):
            raise ValueError(
                f"{name} is named as a LoRA factor, and none of lora_A with lora_B, lora_a with lora_b, lora_down with "
                "lora_up: what it is multiplied with is not known. Rename the factors, or use lora=muon"
            )
        return None
    other, role = _PARTNERS[factor[2]]
    return name[: factor.start(2)] + other + name[factor.end(2) :], role


def product_shape(shape: Sequence[int], partner_shape: Sequence[int], role: str) -> tuple[int, int]:
    """Return the shape ``(out, in)`` of the product of a factor and its partner.

    Raises:
        ValueError: they cannot be multiplied.
    """
    left, right = (shape, partner_shape) if role == B else (partner_shape, shape)
    if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
        raise ValueError(f"lora_B {tuple(left)} times lora_A {tuple(right)} is no product of matrices")
    return left[0], right[1]


def inverse_root(rows: Tensor) -> Tensor:
    """Return ``L`` with ``L L^T`` the pseudo-inverse of ``X X^T``, ``(..., r, r)`` in float64, for ``(..., r, n)``.

    ``L`` is the symmetric root times a rotation, of which ``msign(m L) L^T`` does not depend. Rows are divided by their
    norms first, so that badly scaled ones lose no accuracy; then singular values below the rounding of fp32 are zero.
    """
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)  # (..., r, 1)
    inverse_norms = torch.where(norms > 0, norms.reciprocal(), 0.0)
    unit = rows * inverse_norms
    gram = unit @ unit.mT
    is_finite = gram.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)  # eigh would raise, on one rank
    values, vectors = torch.linalg.eigh(torch.where(is_finite, gram, 0.0))  # ascending
    least = values[..., -1:] * (rows.shape[-2] * torch.finfo(torch.float32).eps ** 2)
    roots = torch.where(values > least, values.clamp(min=0).rsqrt(), 0.0)
    return torch.where(is_finite, inverse_norms * vectors * roots[..., None, :], torch.nan)


def product_directions(
    orthogonalize: Callable[[Tensor], Tensor],
    updates: Tensor,
    partners: Tensor,
    role: str,
    options: Options,
    step: int,
) -> Tensor:
    """Return ``msign(m_B R_A) R_A / 2`` for lora_B ``(B, out, r)``, or its counterpart for lora_A ``(B, r, in)``.

    Args:
        orthogonalize: Newton-Schulz, on any batch of matrices.
        updates: of one role.
        partners: the whole other factors, as they were before the step.
        role: `lora_A` or `lora_B`.
        options: of the param group.
        step: from one.
    """
    device = torch.device("cpu") if updates.device.type == "mps" else updates.device  # which has no float64
    whitening = inverse_root((partners if role == B else partners.mT).to(device, torch.float64))
    moved = (updates if role == B else updates.mT).to(device, torch.float64) @ whitening  # (B, m, r)
    moved = (moved if role == B else moved.mT).to(updates.device, partners.dtype).contiguous()
    signs = orthogonalize(moved).to(device, torch.float64)
    signs = signs if role == B else signs.mT
    directions = signs @ whitening.mT * 0.5
    return (directions if role == B else directions.mT).to(updates.device, partners.dtype).contiguous()


def with_split_decay(
    directions: Tensor, weights: Tensor, state: States, options: Options, step: int, scale: float
) -> Tensor:
    """Return directions by which ``W`` becomes ``s W - lr * scale * direction / s``, with ``s^2 = 1 - lr * decay``.

    Both factors together decay their product by ``1 - lr * decay``.
    """
    rate, decay = max(float(options["lr"]), 0.0), float(options["weight_decay"])
    if not rate * decay:
        return directions
    keep = math.sqrt(1 - rate * decay)
    return directions / keep + weights * ((1 - keep) / (rate * scale))


def complaint(options: Options) -> str | None:
    """Say that weight decay would take more than all of a product."""
    factors = [max(options.get(key) or [1.0]) for key in ("lr_factors", "wd_factors")]
    rate, decay = float(options["lr"]) * factors[0], float(options["weight_decay"]) * factors[1]
    if options["use_muon"] and rate * decay >= 1:
        return (
            f"lora=product decays products by 1 - lr * weight_decay, and lr={rate:g} times weight_decay={decay:g} is "
            "not below 1: lower one of them"
        )
    return None


RULE = Rule(
    name="lora_product",
    options={
        "lora_product": Option(
            types.flag(),
            False,
            "Step the LoRA factors of a Muon group in the geometry of their product; `lora: product` sets it.",
            scope="group",
            source="[2606.12921](https://arxiv.org/abs/2606.12921)",
        )
    },
    is_on=lambda options: options["lora_product"],
    around=product_directions,
    partner=partner,
    scaled_like=product_shape,
    apply=with_split_decay,
    decays=True,
    complaint=complaint,
)
