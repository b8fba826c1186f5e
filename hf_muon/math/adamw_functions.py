"""AdamW's step as functions of flat tensors, which are compiled on accelerators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.math.codes import FOURTH_POWERS, SQUARES, check_blocks, salted_codes
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.rounding import round_to_half, salted_bf16, salted_bits
from hf_muon.math.weight_rounding import is_half


def next_values(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rates: Sequence[Tensor],
    factors: Sequence[Tensor],
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
    first = first + (grad - first) * rates[0]
    second = second * rates[1] + grad * grad * rates[2]
    exact = param.to(dtype) * factors[0] - first / (second.sqrt() * factors[2] + factors[3]) * factors[1]
    return exact, first, second


def _step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Tensor,
    decay: Tensor,
    rest: Tensor,
    keep: Tensor,
    size: Tensor,
    root: Tensor,
    eps: Tensor,
    step_salt: Tensor,
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
    rate: Tensor,
    decay: Tensor,
    rest: Tensor,
    keep: Tensor,
    size: Tensor,
    root: Tensor,
    eps: Tensor,
    step_salt: Tensor,
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
        stored, largest = salted_codes(moment.float(), step_salt, code)
        codes.copy_(stored)
        scales.copy_(largest.squeeze(-1))
    if is_half(param) and stochastic:
        exact = round_to_half(exact, salted_bits(exact, step_salt, first), param.dtype)
    param.copy_(exact)


STEP_CODES = Elementwise(_step_codes, reads=(0, 1, 2, 3, 4, 5), writes=(0, 2, 3, 4, 5))
