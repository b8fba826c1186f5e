"""How the fp32 result of a step becomes bf16 or fp16 weights.

Rounding to nearest loses every update smaller than half a unit in the last place, which at the learning rates of
fine-tuning are nearly all. Rounding up or down at random, with the probabilities that make the mean the exact value,
loses none on average. fp32 weights are not rounded.

Source: Zamirai et al., Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_muon.math.rounding import batched, random_bits, round_to_half, rows_per_chunk

WEIGHT_ROUNDINGS = ("auto", "nearest", "stochastic")


class Result(NamedTuple):
    """What a step makes of some weights.

    Attributes:
        weights: bf16 or fp16, of any shape; as before the step.
        exact: the same after the step, in fp32.
        update: fp32 numbers that tell elements with equal weights apart: their directions, or their first moments.
    """

    weights: Tensor
    exact: Tensor
    update: Tensor


Observer = Callable[[Tensor, Tensor], None]
"""Is shown weights before a step, and after it in fp32."""


def is_half(tensor: Tensor) -> bool:
    """Return whether a tensor is of bf16 or fp16, whose weights a step computes in fp32 and rounds."""
    return tensor.dtype.itemsize < 4


def store_(results: Iterable[Result], weight_rounding: str, step: int, observer: Observer | None = None) -> None:
    """Round the results of a step and store them in the weights.

    Rounding at random hashes the exact value, the update and the step. So it does not depend on where an element is
    stored, and elements with equal weights but different updates are rounded independently.

    Args:
        results: consumed one by one.
        weight_rounding: one of `WEIGHT_ROUNDINGS`.
        step: number of the step.
        observer: sees the weights before they are stored.
    """
    if observer is not None:
        results = _observed(results, observer)
    if weight_rounding == "nearest":
        for result in results:
            result.weights.copy_(result.exact)
        return
    parts = (part for result in results for part in _cut(result))
    for batch in batched(parts, lambda part: part.weights):
        weights = [result.weights for result in batch]
        exact = _joined([result.exact for result in batch])
        bits = random_bits(exact, step, _joined([result.update for result in batch]))
        rounded = round_to_half(exact, bits, weights[0].dtype)
        pieces = torch.split(rounded, [own.numel() for own in weights])
        torch._foreach_copy_(weights, [piece.view(own.shape) for piece, own in zip(pieces, weights, strict=True)])


def _observed(results: Iterable[Result], observer: Observer) -> Iterator[Result]:
    for result in results:
        observer(result.weights, result.exact)
        yield result


def _cut(result: Result) -> Iterator[Result]:
    """Yield parts of a result, of at most a chunk of elements or one row."""
    if all(tensor.is_contiguous() for tensor in result):
        result = Result(*(tensor.view(-1) for tensor in result))
    rows = rows_per_chunk(result.weights, result.weights.shape[1:].numel())
    for parts in zip(*(torch.split(tensor, rows) for tensor in result), strict=True):
        yield Result(*parts)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
