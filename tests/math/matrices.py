"""Matrices to orthogonalize, and every form and block size, which small matrices would not choose themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hf_muon.math.cost import BlockRows

STANDARD = (1, 1, 1, 1, 1)
WAYS = [
    (STANDARD, BlockRows(5, 3)),
    ((3, 2), None),
    ((3, 2), BlockRows(5, 4)),
    ((2, 2, 1), None),
    ((2, 2, 1), BlockRows(3, 3)),
    ((1, 2, 2), BlockRows(4, 7)),
]


def lengths_of(lengths: Sequence[int], steps: int) -> tuple[int, ...]:
    """Return segments for this many steps: those given over and over, the last one cut."""
    result: list[int] = []
    for length in itertools.cycle(lengths):
        if sum(result) == steps:
            return tuple(result)
        result.append(min(length, steps - sum(result)))
    raise AssertionError


def spectrum(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrix.double())


def with_spectrum(m: int, n: int, values: torch.Tensor) -> torch.Tensor:
    """Return a random matrix with these singular values."""
    rank = min(m, n)
    u = torch.linalg.qr(torch.randn(m, rank, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64)).Q
    return (u * values) @ v.T


def frobenius_normalized(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random matrices in fp64, each with Frobenius norm 1."""
    matrices = torch.randn(shape, dtype=torch.float64)
    return matrices / torch.linalg.matrix_norm(matrices, keepdim=True)
