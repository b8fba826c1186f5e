"""Newton-Schulz orthogonalization of whole matrices: ``U S V^T`` to ``U S' V^T``, with ``S'`` near one.

`newton_schulz_step` is the formula. `newton_schulz` repeats it, in the form that takes the fewest FLOPs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_muon.math import cost
from hf_muon.math.coefficients import AUTO, Coefficients, Steps, Triple, resolve
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.precision import compute_dtype
from hf_muon.math.products import Workspace, is_aligned, symmetric_

# The least multiple of 64 MiB with which the 28 matrices (1024, 3072) of Qwen3-0.6B are one batch on an accelerator: a
# step has seven batches, where 512 MiB make nine. Up to 1 GiB it stays seven, and only temporary memory grows.
MAX_BATCH_BYTES = 576 * 2**20
# Dtypes in which the identity is kept apart from small matrices: on their diagonal it would cost bits of the rest.
_APART = {torch.bfloat16}


def newton_schulz_step(
    x: Tensor, coefficients: Triple, work: Workspace, *, apart: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return ``W X`` with ``W = a I + b R + c R^2``, ``R = X X^T``: singular values become ``a s + b s^3 + c s^5``.

    Args:
        x: ``(B, m, n)``, with singular values up to about one; may be overwritten by the next step.
        coefficients: ``(a, b, c)``.
        work: memory for ``R`` and ``W``, ``(B, m, m)``, and for the result.
        apart: whether to compute ``a X + P X``, ``P = b R + c R^2``, which reads ``X`` once more.
        out: memory for the result; by default that of `work`.
    """
    a, b, c = coefficients
    r, free = work.gram_of(x), work.small[-1]
    if apart:
        return work.apply(symmetric_(free, r, r, add=r, beta=b, alpha=c, rows=work.form.small), x, a, out)
    return work.apply(work.weight_(free, r, coefficients), x, out=out)


def newton_schulz_segment(
    x: Tensor, coefficients: Sequence[Triple], work: Workspace, *, out: Tensor | None = None
) -> Tensor:
    """Return ``Q X``: several steps in the Gram form, which computes ``Q`` from the Gram matrix ``R = X X^T``.

    ``R``, ``W`` and ``Q`` are polynomials of the first ``R``: symmetric, and their products commute.

    Args:
        x: ``(B, m, n)``, as in `newton_schulz_step`.
        coefficients: ``(a, b, c)`` of each of at least two steps.
        work: memory for the products and the result.
        out: as in `newton_schulz_step`.
    """
    # All are (B, s, s), s = min(m, n). `gram` is R; `product` is Q, which begins as the first W; `weight` is the W of
    # the current step. `between` takes R W: at first in `scratch`, where no W is yet, then where the last Q was.
    gram, (product, free), scratch, rows = work.gram_of(x), work.small, work.scratch(), work.form.small
    between, weight = scratch, work.weight_(product, gram, coefficients[0])  # W = a I + b R + c R^2
    for step in coefficients[1:]:
        symmetric_(gram, symmetric_(between, gram, weight, rows=rows), weight, rows=rows)  # W R W
        weight = work.weight_(scratch, gram, step)
        product, free = symmetric_(free, product, weight, rows=rows), product  # W Q
        between = free
    return work.apply(product, x, out=out)


def _normalized(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale each matrix of ``(B, m, n)`` to Frobenius norm one, in fp32 (fp64 for fp64); contiguous, in `dtype`.

    It is divided by its largest absolute value first, so that the squares in the norm neither overflow nor vanish. A
    quotient of two numbers that are scaled by the same power of two is the same number: ``2**k * G`` gives the bits of
    ``G``. Zero stays zero.
    """
    wide = torch.promote_types(matrices.dtype, torch.float32)
    # (B, 1, 1), without a copy for absolute values.
    ends = (matrices.amin(dim=(-2, -1), keepdim=True).neg(), matrices.amax(dim=(-2, -1), keepdim=True))
    largest = _or_one(torch.maximum(*ends).to(wide))
    x = torch.div(matrices, largest, out=torch.empty(matrices.shape, dtype=wide, device=matrices.device))
    return x.div_(_or_one(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True))).to(dtype)


def _or_one(divisors: Tensor) -> Tensor:
    """Write one in place of zeros. A smallest divisor would not do: the bits of numbers below it would change."""
    return divisors.masked_fill_(divisors == 0, 1)


def _sum_squares(rows: Tensor, sums: Tensor) -> None:
    """Sum the squares of each row ``(R, n)`` in fp64."""
    sums.copy_(rows.double().square().sum(dim=1))


def _invert(sums: Tensor, powers: Tensor, rests: Tensor) -> None:
    """Split one over the root of the sum of each row ``(B, s)`` into a power of two and a rest of like exponents.

    So both are normal numbers in fp32 for every norm of its range. Zero becomes numbers, by which zeros stay zeros.
    """
    inverse = sums.sum(dim=1).sqrt().clamp(min=_LEAST_NORMS[powers.dtype]).reciprocal()
    power = (inverse.sqrt().view(torch.int64) & _EXPONENT).view(torch.float64)
    powers.copy_(power)
    rests.copy_(inverse / power)


def _scale(matrices: Tensor, powers: Tensor, rests: Tensor, out: Tensor) -> None:
    """Multiply each of the matrices ``(B, m * n)`` by its two numbers, in their dtype."""
    out.copy_((matrices.to(powers.dtype) * powers.unsqueeze(1)).mul_(rests.unsqueeze(1)))


SUM_SQUARES = Elementwise(_sum_squares, reads=(0,), writes=(1,))
INVERT = Elementwise(_invert, reads=(0,), writes=(1, 2))
SCALE = Elementwise(_scale, reads=(0, 1, 2), writes=(3,))
# The bits of an fp64 number that are its exponent.
_EXPONENT = 0x7FF << 52
# The least norm in each dtype that is not zero; in fp64 the least with an inverse.
_LEAST_NORMS = {torch.float32: 2.0**-149, torch.float64: 1e-300}
# Devices with fp64, in which no square of an fp32 number overflows or vanishes.
_WITH_FP64 = {"cuda", "meta"}


def _normalized_in_three(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Do what `_normalized` does, in three launches: norms in fp64, which need no scaling by powers of two."""
    count, *sides = matrices.shape
    wide = torch.promote_types(matrices.dtype, torch.float32)
    flat = matrices.reshape(count, -1)
    # A sum for each max(m, n) elements in the order of memory: (B * min(m, n),), which `_invert` adds up.
    sums = flat.new_empty(count * min(sides), dtype=torch.float64)
    powers, rests = (flat.new_empty(count, dtype=wide) for _ in range(2))
    SUM_SQUARES(flat.view(-1, max(sides)), sums)
    INVERT(sums.view(count, -1), powers, rests)
    out = torch.empty(matrices.shape, dtype=dtype, device=matrices.device)
    SCALE(flat, powers, rests, out.view(count, -1))
    return out


def newton_schulz(
    matrices: Tensor,
    coefficients: Steps,
    dtype: torch.dtype,
    *,
    form: cost.Form | None = None,
    overwrite: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Take Newton-Schulz steps on a batch, from its normalized matrices.

    Args:
        matrices: ``(B, m, n)``, any floating dtype and scale; not written to unless `overwrite` is set.
        coefficients: ``(a, b, c)`` of each step.
        dtype: dtype of the products.
        form: how they are taken; by default as in :mod:`hf_muon.math.cost`.
        overwrite: whether the memory of contiguous `matrices` serves for the products, and maybe for the result.
        out: contiguous memory for the result; by default new, or that of `matrices`.

    Returns:
        ``(B, m, n)`` in ``dtype``, with singular values in the range of the coefficients.
    """
    device = matrices.device.type
    form = form or cost.form(matrices.shape, len(coefficients), dtype, device)
    # In somebody's autocast, products would be in its dtype and not in `dtype`. Meta tensors have no autocast.
    with contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        x = (_normalized_in_three if device in _WITH_FP64 else _normalized)(matrices, dtype)
        work = Workspace(x, form, matrices if overwrite else None)
        start = 0
        for length in form.lengths:
            steps = coefficients[start : start + length]
            start += length
            target = out if start == len(coefficients) else None
            if length == 1:
                x = newton_schulz_step(x, steps[0], work, apart=dtype in _APART, out=target)
            else:
                x = newton_schulz_segment(x, steps, work, out=target)
    return x


def newton_schulz_in_batches(
    matrices: Tensor,
    coefficients: Steps,
    dtype: torch.dtype,
    max_batch_bytes: int = MAX_BATCH_BYTES,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Do what `newton_schulz` does, in batches whose memory is bounded, see `cost.batch_size`; a matrix is not split.

    Args:
        matrices: ``(B, m, n)``, as in `newton_schulz`.
        coefficients: ``(a, b, c)`` of each step.
        dtype: dtype of the products.
        max_batch_bytes: bound on the memory that matrices take together; a single larger matrix is a batch.
        overwrite: as in `newton_schulz`.
    """
    device = matrices.device.type
    form = cost.form(matrices.shape, len(coefficients), dtype, device)
    count = cost.batch_size(matrices.shape, form, dtype, device, max_batch_bytes)
    if matrices.size(0) <= count:
        return newton_schulz(matrices, coefficients, dtype, form=form, overwrite=overwrite)
    directions = matrices.new_empty(matrices.shape, dtype=dtype)
    for part, direction in zip(torch.split(matrices, count), torch.split(directions, count), strict=True):
        # A product may round differently where memory is not aligned.
        out = direction if is_aligned(direction) else None
        direction.copy_(newton_schulz(part, coefficients, dtype, form=form, overwrite=overwrite, out=out))
    return directions


@torch.no_grad()
def orthogonalize(
    matrix: Tensor,
    *,
    ns_coefficients: Coefficients = "polar_express",
    ns_steps: int | str = AUTO,
    ns_dtype: str = "auto",
) -> Tensor:
    """Return ``U S' V^T`` for ``U S V^T``, with ``S'`` near one: the nearest semi-orthogonal matrix, approximately.

    How near depends on the preset. The result does not depend on the scale of the input: ``2**k * G`` gives what ``G``
    gives, at any scale that the dtype can hold. Zero gives zero. The input is never written to.

    Args:
        matrix: ``(m, n)``, or ``(B, m, n)`` for a batch of matrices, floating point.
        ns_coefficients: ``polar_express``, ``original``, three numbers, or a list with three for each step.
        ns_steps: number of Newton-Schulz steps; ``auto`` for as many as the list has, else five.
        ns_dtype: ``auto``, see :mod:`hf_muon.math.precision`, ``bf16``, ``fp16`` or ``fp32``.

    Returns:
        A tensor of the shape and dtype of ``matrix``.

    Raises:
        ValueError: not a matrix or a batch of matrices, not floating point, or an option that is not valid.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; presets in :mod:`hf_muon.math.coefficients`.
    """
    if matrix.ndim not in (2, 3):
        raise ValueError(
            f"orthogonalize expects (m, n) or (B, m, n), got a tensor of shape {tuple(matrix.shape)} [not-a-matrix]"
        )
    if not matrix.is_floating_point():
        raise ValueError(f"orthogonalize expects a floating point tensor, got {matrix.dtype} [not-floating-point]")
    if ns_steps != AUTO and (isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or ns_steps < 1):
        raise ValueError(
            f"ns_steps={ns_steps!r} is not valid: expected auto or an integer of at least 1 [invalid-value]"
        )
    coefficients = resolve(ns_coefficients, ns_steps)
    dtype = compute_dtype(ns_dtype, matrix.device.type, matrix.device.index)
    if matrix.numel() == 0:
        return torch.empty_like(matrix)
    batch = matrix if matrix.ndim == 3 else matrix.unsqueeze(0)
    return newton_schulz_in_batches(batch, coefficients, dtype).to(matrix.dtype).view(matrix.shape)
