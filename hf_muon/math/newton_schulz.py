"""Orthogonalization of whole matrices by Newton-Schulz iteration. No process groups here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_muon.math import cost as forms
from hf_muon.math.coefficients import Triple, resolve
from hf_muon.math.gram import polynomial_of_gram, symmetric_

MAX_BATCH_BYTES = 512 * 2**20
# What is taken from the diagonal of a Gram matrix whose singular values have grown.
_SHIFT = 0.75

NS_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@functools.lru_cache(maxsize=1)
def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware; emulated bf16 is some hundred times slower than fp32."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        found = capabilities()
        return any(found.get(flag, False) for flag in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return any(getattr(torch.cpu, probe, bool)() for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


@functools.lru_cache(maxsize=64)
def compute_dtype(ns_dtype: str, device_type: str, device_index: int | None = None) -> torch.dtype:
    """The dtype Newton-Schulz runs in on a device.

    ``auto`` is bf16 where the hardware multiplies it and fp32 where it does not.

    Raises:
        ValueError: an unknown ``ns_dtype``, or fp16 on a CPU.
    """
    if ns_dtype not in NS_DTYPES:
        raise ValueError(f"ns_dtype={ns_dtype!r} is not valid. Valid: {', '.join(NS_DTYPES)}")
    if ns_dtype == "fp16" and device_type == "cpu":
        raise ValueError("ns_dtype=fp16 does not run on a CPU, where fp16 has no fast product. Use auto, bf16 or fp32")
    chosen = NS_DTYPES[ns_dtype]
    if chosen is not None:
        return chosen
    if device_type == "cpu":
        has_bf16 = _cpu_has_bf16()
    elif device_type == "cuda":
        # Device index matters: one machine may hold cards of different generations.
        has_bf16 = torch.version.hip is not None or torch.cuda.get_device_capability(device_index)[0] >= 8
    elif device_type == "xpu":
        has_bf16 = torch.xpu.is_bf16_supported()
    else:
        has_bf16 = False
    return torch.bfloat16 if has_bf16 else torch.float32


def _normalized(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Each matrix of ``(B, m, n)`` divided by its Frobenius norm, in fp32 (fp64 for fp64), then in `dtype`; contiguous.

    A power of two goes first. That step is exact, so ``2**k * G`` gives the same bits as ``G``, and the squares in the
    norm neither overflow nor vanish. Zero stays zero.
    """
    wide = torch.promote_types(matrices.dtype, torch.float32)
    tiny = torch.finfo(wide).tiny
    # Without a copy for the absolute values.
    ends = (matrices.amin(dim=(-2, -1), keepdim=True).neg(), matrices.amax(dim=(-2, -1), keepdim=True))
    largest = torch.maximum(*ends).to(wide).clamp_(min=tiny)
    power = torch.frexp(largest).mantissa.div_(largest).clamp_(min=tiny)
    x = torch.mul(matrices, power, out=torch.empty(matrices.shape, dtype=wide, device=matrices.device))
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x.div_(norm.clamp_(min=tiny)).to(dtype)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def newton_schulz(
    matrices: Tensor,
    coefficients: Sequence[Triple],
    dtype: torch.dtype,
    *,
    lengths: Sequence[int] | None = None,
    rows: forms.Rows | None = None,
) -> Tensor:
    """Newton-Schulz iteration on a batch.

    Args:
        matrices: ``(B, m, n)``, any floating dtype and scale; not written to.
        coefficients: ``(a, b, c)`` of each step.
        dtype: the dtype of the products.
        lengths: how many steps are taken on one Gram matrix, from the first on; :mod:`hf_muon.math.cost` by default.
        rows: how many rows of symmetric products are computed in one go; :mod:`hf_muon.math.cost` by default.

    Returns:
        ``(B, m, n)`` in ``dtype``, singular values in the band of the coefficients.
    """
    tall = matrices.size(-2) > matrices.size(-1)
    # TF32, which a GPU may make of fp32, has no more bits than fp16.
    few_bits = dtype.itemsize < 4 or matrices.device.type != "cpu"
    lengths = lengths or forms.segments(matrices.shape, len(coefficients), dtype)
    with _without_autocast(matrices.device.type):
        x = _normalized(matrices, dtype)  # (B, m, n)
        count, size = x.size(0), min(x.shape[1:])
        rows = rows or forms.rows_at_once(size, dtype, x.device.type)
        spare = torch.empty_like(x)
        gram, *small = (forms.small_matrix(x, size, rows) for _ in range(forms.small_matrices(lengths)))
        taken = 0
        for length in lengths:
            steps = coefficients[taken : taken + length]
            # Most singular values are near one by then. With few bits their squares are rounded less without it.
            shift = _SHIFT if few_bits and taken and length == 2 else 0.0
            taken += length
            identity = torch.eye(size, dtype=dtype, device=x.device).expand(count, -1, -1) if shift else None
            wide, long = (x.mT, x) if tall else (x, x.mT)  # the Gram matrix is the smaller of the two
            symmetric_(gram, wide, long, add=identity, beta=-shift, rows=rows.gram)
            q, polynomial = polynomial_of_gram(gram, shift, steps, small, rows.small)
            # (q I + P) X, or X (q I + P) in place of transposing.
            factors = (x, polynomial) if tall else (polynomial, x)
            if few_bits:
                torch.baddbmm(x, *factors, beta=q, out=spare)
            else:
                polynomial.diagonal(dim1=-2, dim2=-1).add_(q)  # which has bits enough, and spares a copy of x
                torch.bmm(*factors, out=spare)
            x, spare = spare, x
    return x


@dataclass(frozen=True)
class Orthogonalizer:
    """`newton_schulz` with its options bound: whole matrices ``(B, m, n)`` to their directions, in `dtype`.

    Attributes:
        coefficients: ``(a, b, c)`` of each step.
        dtype: the dtype of the products.
        max_batch_bytes: bound on what orthogonalizing holds, the input and the result among it; larger batches go in
            parts. One matrix always goes.
    """

    coefficients: tuple[Triple, ...]
    dtype: torch.dtype
    max_batch_bytes: int = MAX_BATCH_BYTES

    def __call__(self, matrices: Tensor) -> Tensor:
        lengths = forms.segments(matrices.shape, len(self.coefficients), self.dtype)
        rows = forms.rows_at_once(min(matrices.shape[1:]), self.dtype, matrices.device.type)
        held = matrices.numel() * (matrices.dtype.itemsize + self.dtype.itemsize)
        room = max(1, (self.max_batch_bytes - held) // forms.working_bytes(matrices.shape, lengths, self.dtype, rows))
        if matrices.size(0) <= room:
            return newton_schulz(matrices, self.coefficients, self.dtype, lengths=lengths, rows=rows)
        directions = matrices.new_empty(matrices.shape, dtype=self.dtype)
        for part, direction in zip(torch.split(matrices, room), torch.split(directions, room), strict=True):
            direction.copy_(newton_schulz(part, self.coefficients, self.dtype, lengths=lengths, rows=rows))
        return directions


@torch.no_grad()
def orthogonalize(
    matrix: Tensor,
    *,
    ns_coefficients: str | Sequence[float] = "polar_express",
    ns_steps: int = 5,
    ns_dtype: str = "auto",
) -> Tensor:
    """The nearest semi-orthogonal matrix, up to the band of the preset: ``U S' V^T`` for ``U S V^T``, ``S'`` near one.

    The direction depends on the direction of the input alone: ``2**k * G`` gives what ``G`` gives, at any scale that
    the dtype can hold. Zero gives zero. The input is never written to.

    Args:
        matrix: ``(m, n)``, or ``(B, m, n)`` for a batch of matrices, floating point.
        ns_coefficients: ``polar_express``, ``original``, ``you_jiacheng``, ``cans``, or three numbers.
        ns_steps: number of Newton-Schulz steps; four have the wider band of the preset's `band_of_four`.
        ns_dtype: ``auto`` (bf16 where the hardware has it, else fp32), ``bf16``, ``fp16`` or ``fp32``.

    Returns:
        A tensor of the shape and dtype of ``matrix``.

    Raises:
        ValueError: not a matrix or a batch of matrices, not floating point, or an option that is not valid.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon/; presets in :mod:`hf_muon.math.coefficients`.
    """
    if matrix.ndim not in (2, 3):
        raise ValueError(f"orthogonalize expects (m, n) or (B, m, n), got a tensor of shape {tuple(matrix.shape)}")
    if not matrix.is_floating_point():
        raise ValueError(f"orthogonalize expects a floating point tensor, got {matrix.dtype}")
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or ns_steps < 1:
        raise ValueError(f"ns_steps={ns_steps!r} is not valid: expected an integer of at least 1")
    coefficients = resolve(ns_coefficients, ns_steps)
    dtype = compute_dtype(ns_dtype, matrix.device.type, matrix.device.index)
    if matrix.numel() == 0:
        return torch.empty_like(matrix)
    batch = matrix if matrix.ndim == 3 else matrix.unsqueeze(0)
    return Orthogonalizer(coefficients, dtype)(batch).to(matrix.dtype).view(matrix.shape)
