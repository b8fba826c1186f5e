"""Factors of the learning rate, one for every parameter of a param group.

A group may have a list `lr_factors`; without it, every factor is 1.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from hf_muon.storage.partitions import Partition, Partitions
from hf_muon.storage.tensors import quoted

KEY = "lr_factors"
"""The key of the list in param groups; its value may be None."""

FactorRuns = Sequence[tuple[slice, float]]
"""Slices of a parameter's elements, in order, each with its factor. What is in none of them is padding."""


def list_complaint(values: Any, count: int | None = None) -> str | None:
    """Return why a value is neither None nor a list of factors, one for each of `count` parameters; None if it is."""
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(map(_is_factor, values)):
        return f"{quoted(values)} is not a list of numbers of at least 0"
    return None if count in (None, len(values)) else f"{len(values)} of {count} parameters"


def _is_factor(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    with contextlib.suppress(OverflowError):
        return is_number and 0 <= float(value) < math.inf
    return False


def has_factors(group: Mapping[str, Any]) -> bool:
    """Return whether some parameter of a group may have a factor that is not 1."""
    return group.get(KEY) is not None


def factors_of(group: Mapping[str, Any]) -> list[float]:
    """Return the factor of each parameter that the group had before ZeRO's partitions replaced them."""
    values = group.get(KEY)
    return [1.0] * len(group["params"]) if values is None else list(map(float, values))


def factor_runs(group: Mapping[str, Any], partitions: Partitions) -> list[FactorRuns]:
    """Return the factors of the elements of each parameter, or flat partition, of an AdamW group."""
    if not any(param in partitions for param in group["params"]):
        return [[(slice(0, None), factor)] for factor in factors_of(group)]
    return [_runs_of_partition(partitions[param]) for param in group["params"]]


def _runs_of_partition(partition: Partition) -> FactorRuns:
    pairs = [(slice_.elements(partition.rank), slice_.factor) for slice_ in partition.slices]
    # With round_robin_gradients, DeepSpeed stores the parameters of a group in another order.
    pairs = sorted((pair for pair in pairs if pair[0].start < pair[0].stop), key=lambda pair: pair[0].start)
    runs: list[tuple[slice, float]] = []
    for factor, alike in itertools.groupby(pairs, key=lambda pair: pair[1]):
        elements = [pair[0] for pair in alike]
        runs.append((slice(elements[0].start, elements[-1].stop), factor))
    return runs or [(slice(0, None), 1.0)]
