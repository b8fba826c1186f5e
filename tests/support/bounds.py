"""Bounds on rounding, computed from a control in the same run instead of read off one machine.

Two ways to sum the same products round differently, and the processor decides how much. Floating point is backward
stable: a computed result is the exact one for inputs that are a few units in the last place away. So a control repeats
the simpler computation from inputs that are moved by one unit in the last place, and two ways may differ by a small
multiple of what that move changes. The bound includes the cancellation of these gradients, their amplification by
Newton-Schulz, and the rounding of the stored weights. A wrong scale, sum or matrix exceeds it by orders of magnitude,
as `tests/test_bounds.py` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

TIMES = 8
"""How many times the control's difference is still rounding. Two ways to sum differ by 0.5 to 2.3 times of it in every
layout, whether products are made with AVX-512, AVX2 or SSE."""


def moved(tensor: Tensor, seed: int = 0) -> Tensor:
    """Return the tensor with each element one unit in the last place higher or lower, at random."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.rand(tensor.shape, generator=generator) < 0.5
    infinity = torch.full_like(tensor, torch.inf)
    return torch.where(up.to(tensor.device), torch.nextafter(tensor, infinity), torch.nextafter(tensor, -infinity))


@torch.no_grad()
def move(model: nn.Module, seed: int | None = 0) -> None:
    """Move all weights of a model by one unit in the last place; not at all where `seed` is None."""
    if seed is not None:
        for i, param in enumerate(model.parameters()):
            param.copy_(moved(param, 1000 * seed + i))


def rounding(expected: Mapping[str, Tensor], controls: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the distance that rounding explains for each tensor: the largest distance of any control.

    Args:
        expected: results by name.
        controls: results of the same computation from inputs moved by one unit in the last place, with different
            signs in each.
    """
    spread = {}
    for name, tensor in expected.items():
        # Storing rounds, too. With a few numbers, such as losses, controls may equal `expected` by chance.
        share = 1 if tensor.numel() < 16 else 1 / TIMES
        least = share * torch.finfo(tensor.dtype).eps * float(tensor.double().norm())
        spread[name] = max([least, *(_apart(control[name], tensor) for control in controls)])
    return spread


def beyond(
    results: Mapping[str, Tensor], expected: Mapping[str, Tensor], spread: Mapping[str, float], times: float = TIMES
) -> dict[str, float]:
    """Return the tensors that are farther apart than `times` their `rounding`, and by how many times that bound."""
    assert results.keys() == expected.keys()
    shares = {}
    for name, tensor in expected.items():
        apart, bound = _apart(results[name], tensor), times * spread[name]
        if not apart <= bound:  # true for NaN as well
            shares[name] = apart / bound if bound else torch.inf
    return shares


def beyond_rounding(
    results: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    controls: Sequence[Mapping[str, Tensor]],
    times: float = TIMES,
) -> dict[str, float]:
    """Return the tensors that `beyond` finds with the `rounding` of the controls."""
    return beyond(results, expected, rounding(expected, controls), times)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())
