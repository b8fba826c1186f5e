"""Symmetric products by one Triton kernel, which computes half of them: a candidate, to be measured on a card.

``C = beta D + alpha A B^T`` for batches ``(B, s, l)``, where C is symmetric: ``X X^T``, polynomials of one Gram matrix.
A block computes one tile on or below the diagonal and stores it twice. Tiles depend only on the card and the size: they
are not chosen by timing, sums have a fixed order, and the number of matrices is not an argument. So a matrix has the
same bits in any batch, on any rank and in any run. cuBLAS computes the sizes that `tile_of` does not have.

hf_muon does not use this kernel: :mod:`benchmarks.gpu` measures whether it should.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_muon.math import newton_schulz, products


class Tile(NamedTuple):
    """How a block computes a square tile.

    Attributes:
        side: rows and columns of the tile.
        depth: columns of A and B that are multiplied at once.
        warps: of a block.
        stages: loads in flight.
    """

    side: int
    depth: int
    warps: int
    stages: int


# By capability. Sizes from the first number on; below 512 a product is too small for half of it to be faster.
TABLE: dict[int, dict[int, Tile]] = {
    90: {512: Tile(128, 64, 8, 3)},
    100: {512: Tile(128, 64, 8, 3)},
    120: {512: Tile(128, 32, 8, 3)},
}
_DTYPES = {torch.float16, torch.bfloat16}
_MULTIPLE = 8  # elements of 16 bytes, which TMA needs between rows


def tile_of(capability: int, size: int, dtype: torch.dtype) -> Tile | None:
    """Return the tile for symmetric products of a size on a card, None for cuBLAS. It never depends on the batch."""
    known = [tile for least, tile in TABLE.get(capability, {}).items() if least <= size]
    return known[-1] if known and dtype in _DTYPES and size % _MULTIPLE == 0 else None


@triton.jit(do_not_specialize=["n", "length"])
def kernel(
    a,
    b,
    d,
    c,
    alpha,
    beta,
    n,
    length,
    side: tl.constexpr,
    depth: tl.constexpr,
    adds: tl.constexpr,
    turned: tl.constexpr,
):
    """Compute a tile of ``C = beta D + alpha A B^T`` and its mirror image.

    Args:
        a, b: descriptors of A and B ``(B, s, l)``; of their transposes ``(B, l, s)`` if they are `turned`.
        d, c: descriptors of D, which is read if it `adds`, and of C ``(B, s, s)``; may be the same memory.
        alpha, beta: factors.
        n: number of tiles along the rows of C.
        length: l.
    """
    # Rows of tiles k and n - 1 - k have n + 1 tiles together.
    tile, matrix = tl.program_id(0), tl.program_id(1)
    pair, at = tile // (n + 1), tile % (n + 1)
    i = tl.where(at <= pair, pair, n - 1 - pair)
    j = tl.where(at <= pair, at, at - pair - 1)
    row, column = i * side, j * side
    total = tl.zeros((side, side), tl.float32)
    for k in range(0, length, depth):
        if turned:
            left = tl.trans(a.load([matrix, k, row]).reshape(depth, side))
            right = b.load([matrix, k, column]).reshape(depth, side)
        else:
            left = a.load([matrix, row, k]).reshape(side, depth)
            right = tl.trans(b.load([matrix, column, k]).reshape(side, depth))
        total = tl.dot(left, right, total)
    total = total * alpha
    if adds:
        total = tl.fma(d.load([matrix, row, column]).reshape(side, side).to(tl.float32), beta, total)
    own = total.to(c.dtype)
    if i == j:  # A B^T is symmetric but for rounding: one half of the tile counts for both
        index = tl.arange(0, side)
        own = tl.where(index[:, None] < index[None, :], tl.trans(own), own)
    else:
        c.store([matrix, column, row], tl.trans(own).reshape(1, side, side))
    c.store([matrix, row, column], own.reshape(1, side, side))


class Products:
    """Symmetric products of a batch. Descriptors of its memory are made once: each takes the host as long as a call.

    Args:
        tile: of the kernel.

    Attributes:
        calls: so far.
    """

    def __init__(self, tile: Tile) -> None:
        self.calls = 0
        self._tile = tile
        self._descriptors: dict[tuple[Any, ...], TensorDescriptor] = {}

    def __call__(
        self, out: Tensor, a: Tensor, b: Tensor, *, add: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
    ) -> Tensor:
        """Compute ``out = beta * add + alpha * a @ b.mT``, which is symmetric.

        Args:
            out: ``(B, s, s)``; may be `add`, but neither `a` nor `b`.
            a, b: ``(B, s, l)``, both stored by rows, or both by columns.
            add: ``(B, s, s)``; None to add nothing.
            beta, alpha: factors.
        """
        side, depth, warps, stages = self._tile
        n, turned = math.ceil(out.size(-1) / side), a.stride(-1) != 1
        factors = [
            self._descriptor(each.mT, (1, depth, side)) if turned else self._descriptor(each, (1, side, depth))
            for each in (a, b)
        ]
        c, d = (self._descriptor(each, (1, side, side)) for each in (out, out if add is None else add))
        grid = (n * (n + 1) // 2, out.size(0))
        adds, options = add is not None, {"num_warps": warps, "num_stages": stages}
        self.calls += 1
        kernel[grid](*factors, d, c, alpha, beta, n, a.size(-1), side, depth, adds, turned, **options)
        return out

    def _descriptor(self, matrices: Tensor, block: Sequence[int]) -> TensorDescriptor:
        key = matrices.data_ptr(), matrices.shape, matrices.stride(), block
        if key not in self._descriptors:
            self._descriptors[key] = TensorDescriptor.from_tensor(matrices, list(block))
        return self._descriptors[key]


@contextlib.contextmanager
def multiplying(tile: Tile) -> Iterator[Products]:
    """Have Newton-Schulz compute its symmetric products by the kernel in the `with` block."""
    kernels = Products(tile)

    def symmetric_(out: Tensor, a: Tensor, b: Tensor, *, rows: int, **addend: Any) -> Tensor:
        # B is A^T, or a symmetric matrix, which is stored as A is.
        return kernels(out, a, b.mT if (a.stride(-1) == 1) != (b.stride(-1) == 1) else b, **addend)

    with (
        mock.patch.object(products, "symmetric_", symmetric_),
        mock.patch.object(newton_schulz, "symmetric_", symmetric_),
    ):
        yield kernels
