"""The products of a Newton-Schulz step in preallocated memory. Symmetric products are computed by half."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_muon.math import cost
from hf_muon.math.coefficients import Triple
from hf_muon.math.elementwise import is_accelerator

# Kernels for sums and products may add in another order where memory is not aligned.
_ALIGNED_BYTES = 256


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins at an aligned address, as new ones do."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize % _ALIGNED_BYTES == 0


def _allocator(free: Tensor | None, like: Tensor) -> Callable[[Sequence[int]], Tensor]:
    """Return a function from shapes to contiguous memory: aligned parts of `free` while there are any, then new memory.

    Args:
        free: contiguous, in any dtype; is written to.
        like: a tensor with the dtype and device of the memory to return.
    """
    rest = like.new_empty(0).view(torch.uint8) if free is None else free.view(-1).view(torch.uint8)
    begin = 0 if free is None else -int(free.storage_offset()) * free.dtype.itemsize % _ALIGNED_BYTES

    def carve(shape: Sequence[int]) -> Tensor:
        nonlocal begin
        first, nbytes = begin, math.prod(shape) * like.dtype.itemsize
        if first + nbytes > rest.numel():
            return like.new_empty(shape)
        begin += math.ceil(nbytes / _ALIGNED_BYTES) * _ALIGNED_BYTES
        return rest[first : first + nbytes].view(like.dtype).view(shape)

    return carve


def symmetric_(
    out: Tensor, a: Tensor, b: Tensor, *, add: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0, rows: int
) -> Tensor:
    """Compute ``out = beta * add + alpha * a @ b``, which must be symmetric: the upper triangle is copied.

    Args:
        out: ``(B, s, s)``; may be `add`, but neither `a` nor `b`.
        a: ``(B, s, l)``.
        b: ``(B, l, s)``.
        add: ``(B, s, s)``; if None, nothing is added and `alpha` must be one.
        rows: rows of a block. A block is computed up to its end on the diagonal.
    """
    size = out.size(-1)
    if rows >= size:
        return _product_(out, a, b, add, beta, alpha)
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        block = out[:, start:stop, :stop]
        addend = None if add is None else add[:, start:stop, :stop]
        _product_(block, a[:, start:stop], b[:, :, :stop], addend, beta, alpha)
        # What lies above the diagonal block is what lies left of it, transposed.
        if start:
            out[:, :start, start:stop].copy_(out[:, start:stop, :start].mT)
    return out


def _product_(out: Tensor, a: Tensor, b: Tensor, add: Tensor | None, beta: float, alpha: float) -> Tensor:
    """Compute ``out = beta * add + alpha * a @ b``."""
    # On a GPU torch first copies `add` into `out`: cuBLAS has one matrix for both. `a` and `b` must not be `out`.
    # A CPU's library for bf16 copies parts of larger matrices before it multiplies a batch of them, not single ones.
    if out.device.type == "cpu" and out.dtype.itemsize < 4 and any(map(_is_part, (out, a, b))):
        for k in range(out.size(0)):
            if add is None:
                torch.mm(a[k], b[k], out=out[k])
            else:
                torch.addmm(add[k], a[k], b[k], beta=beta, alpha=alpha, out=out[k])
        return out
    if add is None:
        return torch.bmm(a, b, out=out)
    return torch.baddbmm(add, a, b, beta=beta, alpha=alpha, out=out)


def _is_part(matrices: Tensor) -> bool:
    """Return whether there are gaps in the memory of a batch ``(B, m, n)``."""
    return matrices.stride(0) != matrices.size(1) * matrices.size(2)


class Workspace:
    """Memory for Newton-Schulz steps on a batch ``X``, and the products in it.

    ``X`` is ``(B, m, n)`` with ``m <= n``. A tall batch is used as its transpose: ``R`` is then ``X^T X``, and
    products with small matrices are taken from the right, which saves a transposition.

    Args:
        x: the batch. Its memory is used too: the first `apply` makes it the output of the second one.
        form: how it is orthogonalized.
        free: contiguous memory that may be overwritten, in any dtype; what does not fit into it is allocated.

    Attributes:
        gram: ``(B, s, s)``, where ``R`` is computed.
        small: more matrices ``(B, s, s)``: one, or two if any segment is longer than one step.
    """

    def __init__(self, x: Tensor, form: cost.Form, free: Tensor | None = None) -> None:
        self._size = min(x.shape[1:])
        carve = _allocator(free, x)
        self._next = carve(x.shape)
        self._shape = (x.size(0), self._size, cost.row_length(self._size, form))
        count = cost.small_matrices(form)
        self.gram, *self.small = (carve(self._shape)[..., : self._size] for _ in range(count))
        self.form = form
        self._identity: Tensor | None = None
        self._tall = x.size(-2) > x.size(-1)

    def scratch(self) -> Tensor:
        """Return one more matrix ``(B, s, s)``, until the next `apply`, in whose output it lies if it fits there."""
        numel = math.prod(self._shape)
        if numel > self._next.numel():
            return self._next.new_empty(self._shape)[..., : self._size]
        return self._next.view(-1)[:numel].view(self._shape)[..., : self._size]

    def gram_of(self, x: Tensor) -> Tensor:
        """Return ``R = X X^T``."""
        wide, long = (x.mT, x) if self._tall else (x, x.mT)
        return symmetric_(self.gram, wide, long, rows=self.form.gram)

    def weight_(self, out: Tensor, r: Tensor, step: Triple) -> Tensor:
        """Compute ``W = a I + b R + c R^2`` into `out`, which is not `r`; ``R`` is symmetric."""
        a, b, c = step
        # Below, beta = b multiplies the identity, too: b (R + a/b I) = a I + b R. So b must not be zero; and a host has
        # no launches to save.
        if not b or not is_accelerator(r.device):
            symmetric_(out, r, r, add=r, beta=b, alpha=c, rows=self.form.small)
            out.diagonal(dim1=-2, dim2=-1).add_(a)
            return out
        # One launch for the identity and for the addend, which would be copied into `out` anyway.
        if self._identity is None:
            self._identity = torch.eye(self._size, dtype=r.dtype, device=r.device)
        torch.add(r, self._identity, alpha=a / b, out=out)
        return symmetric_(out, r, r, add=out, beta=b, alpha=c, rows=self.form.small)

    def apply(self, p: Tensor, x: Tensor, a: float = 0.0, out: Tensor | None = None) -> Tensor:
        """Return ``a X + P X``, in `out` if that is given. ``X`` is overwritten by the next call."""
        if out is None:
            out, self._next = self._next, x
        factors = (x, p) if self._tall else (p, x)
        return _product_(out, *factors, x if a else None, a, 1.0)
