"""Which elements of the parameters of an AdamW group have which factor of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_muon.math.adamw import Stepped
from hf_muon.storage.factors import factors_of
from hf_muon.storage.partitions import Partitions

Group = Mapping[str, Any]
FactorRuns = Sequence[tuple[slice, float]]
"""Adjacent slices of a parameter's elements that make up all of them, each with its factor."""


def factor_runs(group: Group, partitions: Partitions) -> list[FactorRuns]:
    """Return the factors of the elements of each parameter of an AdamW group; those of padding are 1."""
    each = factors_of(group)
    runs: list[FactorRuns] = []
    for i, param in enumerate(group["params"]):
        partition = partitions.get(param)
        if partition is None:
            runs.append([(slice(0, None), each[i])])
            continue
        own: list[tuple[slice, float]] = []
        # With round_robin_gradients, DeepSpeed stores the parameters of a group in another order.
        in_order = sorted(partition.slices, key=lambda part: part.elements(partition.rank).start)
        for part in in_order:
            elements = part.elements(partition.rank)
            if own and own[-1][1] == part.factor and own[-1][0].stop == elements.start:
                own[-1] = (slice(own[-1][0].start, elements.stop), part.factor)
            elif elements.start < elements.stop:
                _pad(own, elements.start)
                own.append((elements, part.factor))
        _pad(own, param.numel())
        runs.append(own)
    return runs


def _pad(runs: list[tuple[slice, float]], start: int) -> None:
    end = runs[-1][0].stop if runs else 0
    if end < start:
        runs.append((slice(end, start), 1.0))


def parts_of(own: Stepped, runs: FactorRuns) -> Iterator[tuple[float, Stepped]]:
    """Yield the parts of a parameter that have the same factor, each with a step counter of its own."""
    if len(runs) == 1:
        yield runs[0][1], own
        return
    step = own.state["step"]  # AdamW increments each part's counter, and the parameter's own once
    tensors = {key: value for key, value in own.state.items() if key != "step"}
    for i, (elements, factor) in enumerate(runs):
        moments = {key: value[elements] for key, value in tensors.items()}
        counter = step.clone() if i else step
        yield factor, Stepped(own.param[elements], own.grad[elements], {"step": counter, **moments})
