"""Collect metrics during a step, without communication and without modifying its tensors."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hf_muon.config import GROUP_OPTIONS
from hf_muon.diagnostics import facts
from hf_muon.diagnostics.measures import adamw_sum_of_squares, orthogonality_error, stable_rank, sum_of_squares
from hf_muon.diagnostics.metrics import Metrics
from hf_muon.diagnostics.watch import Watch
from hf_muon.distributed.units import Piece
from hf_muon.math.adamw import MOMENTS_OF_ADAMW
from hf_muon.math.moments import decoded, decoded_chunks
from hf_muon.math.momentum import BUFFER
from hf_muon.optimizer.layout import GroupWork
from hf_muon.rules import registry
from hf_muon.storage.tensors import has_data, local_of

if TYPE_CHECKING:
    from hf_muon.distributed.units import Unit

Group = Mapping[str, Any]
_F = TypeVar("_F", bound=Callable[..., Any])


def _harmless(measure: _F) -> _F:
    """Let no error of a measure end a step: other ranks measure nothing, and would wait for this one."""

    @functools.wraps(measure)
    def guarded(self: StepWatch | GroupWatch, *args: Any, **kwargs: Any) -> Any:
        try:
            return measure(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  of memory, for example
            reason = f"{type(error).__name__}: {error}"
            return self.metrics.stop(f"no more metrics: they cannot be measured ({reason}) [metrics-failed]")

    return guarded  # type: ignore[return-value]


_MOST_PARTS = 8
"""Maximum number of matrices of one weight with separate measures; more, as with `per_head`, share a mean."""


class StepWatch:
    """One step observed by metrics: always timed, measured only if a line of metrics is due.

    Args:
        metrics: those of the optimizer.
        groups: all param groups.
        partitioned: whether they hold flat partitions.
    """

    def __init__(self, metrics: Metrics, groups: Sequence[Group], *, partitioned: bool) -> None:
        # A framework that steps one partition after the other empties the other groups.
        first = next(group for group in groups if group["params"])
        self.metrics = metrics
        self._groups = groups
        self._partitioned = partitioned
        self._step = first["step"] + 1
        self._watch: Watch | None = None
        self._begin(local_of(first["params"][0]).device)

    @_harmless
    def _begin(self, device: torch.device) -> None:
        self._watch = self.metrics.begin(self._step, device)
        if self._watch is not None:
            self._watch.options.update(facts.options(self._groups, GROUP_OPTIONS))

    @_harmless
    def of_group(self, group: Group, work: GroupWork) -> GroupWatch | None:
        """Return the watch of a group's step; None if the step is only timed."""
        return None if self._watch is None else GroupWatch(self.metrics, self._watch, group, work, self._names(group))

    @_harmless
    def end(self, logits: Mapping[str, float], clipped: int, *, complete: bool) -> None:
        """End the step, or a part of it if it is not complete.

        Args:
            logits: the largest of each attention, by its name, if they are measured.
            clipped: number of heads whose rows were rescaled because of them.
            complete: whether no other part follows.
        """
        if self._watch is not None and logits:
            self._watch.logits, self._watch.clipped = dict(logits), clipped
        self.metrics.end(self._step, whole=complete)

    def _names(self, group: Group) -> list[str]:
        """Return a name for each parameter of a group."""
        names = list(group.get("param_names") or [])
        if self._partitioned:
            return [f"{len(names)} parameters, weight decay {group['weight_decay']:g}"] * len(group["params"])
        if names:
            return names
        number = next(k for k, other in enumerate(self._groups) if other is group)
        return [f"group {number}, parameter {i}" for i in range(len(group["params"]))]


class GroupWatch:
    """Measures the step of one param group, under the names of its parameters.

    Args:
        metrics: those of the optimizer.
        watch: takes the measures.
        group: the param group.
        work: the work of the group.
        names: the names of its parameters.
    """

    def __init__(self, metrics: Metrics, watch: Watch, group: Group, work: GroupWork, names: Sequence[str]) -> None:
        self.metrics = metrics
        self._watch = watch
        self._group = group
        self._work = work
        self._parameters = names
        self._errors: dict[int, tuple[Unit, Tensor]] = {}
        self._names = _numbered([matrix.name or names[matrix.param] for matrix in work.matrices])
        self._rate = float(group["lr"])
        watch.numbers["muon_lr" if group["use_muon"] else "adamw_lr"] = self._rate
        for name, matrix in zip(self._names, work.matrices, strict=True):
            watch.moves(name, matrix.shape, self._rate * matrix.factor)

    @_harmless
    def updates(self, unit: Unit, updates: Tensor) -> None:
        """Measure whole matrices ``(B, m, n)`` on the rank that orthogonalizes them next."""
        self._add_batch("stable_rank", unit, stable_rank(updates))

    @_harmless
    def orthogonalized(self, unit: Unit, directions: Tensor) -> None:
        """Measure directions ``(B, m, n)`` on the rank that has made them; of several for one unit the last count."""
        self._errors[id(unit)] = unit, orthogonality_error(directions)

    def _add_batch(self, measure: str, unit: Unit, values: Tensor) -> None:
        counts = [each.stop - each.start for each in unit.ranges]
        for each, count, of_range in zip(unit.ranges, counts, torch.split(values, counts), strict=True):
            self._watch.add(measure, self._names[each.matrix], of_range.sum(), count)

    @_harmless
    def directions(
        self,
        pieces: Sequence[Piece],
        directions: Sequence[Tensor],
        scales: Sequence[float],
        weights: Sequence[Tensor],
    ) -> None:
        """Measure directions before they are scaled, and the weights of these pieces before they move."""
        for piece, direction, scale, weight in zip(pieces, directions, scales, weights, strict=True):
            name = self._names[piece.matrix]
            self._watch.add("update_rms", name, sum_of_squares(direction) * scale**2, direction.numel())
            self._watch.add("weight_rms", name, sum_of_squares(weight), weight.numel())

    @_harmless
    def end(self, moments: Mapping[int, Mapping[str, Tensor]], hyperparameters: Group) -> None:
        """Measure this rank's part of the momentum of matrices after the step, and record options that rules change."""
        for unit, errors in self._errors.values():
            self._add_batch("orthogonality_error", unit, errors)
        for matrix, stored in moments.items():
            buffer = decoded(stored, BUFFER)
            self._watch.add("momentum_rms", self._names[matrix], sum_of_squares(buffer), buffer.numel())
        if any(rule.hyperparameters is not None for rule in registry.rules_of(self._group)):
            for key in ("momentum", "weight_decay"):
                self._watch.numbers[f"muon_{key}"] = float(hyperparameters[key])

    @_harmless
    def adamw(self, param: int, weight: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Measure this rank's part of a parameter and of its moments after the step; local tensors."""
        name = self._parameters[param]
        runs = self._work.factors[param] if self._work.factors else []
        # The parameters in a partition are measured together, whatever their factors.
        factor = runs[0][1] if len(runs) == 1 else 1.0
        self._watch.moves(name, (), self._rate * factor)
        self._watch.add("adamw_weight_rms", name, sum_of_squares(weight), weight.numel())
        options = (self._group["adamw_betas"], self._group["adamw_eps"])
        for chunk in decoded_chunks(moments, MOMENTS_OF_ADAMW):
            first, second = chunk["exp_avg"], chunk["exp_avg_sq"]
            squares = adamw_sum_of_squares(first, second, moments["step"], *options)
            self._watch.add("adamw_update_rms", name, squares, first.numel())


def can_watch(groups: Sequence[Group]) -> bool:
    """Return whether tensors have values to measure, unlike fake tensors and those of the meta device."""
    return all(has_data(local_of(param)) for group in groups for param in group["params"][:1])


def _numbered(names: Sequence[str]) -> list[str]:
    """Return the names of matrices, with numbers where a few matrices have the same parameter."""
    counts = Counter(names)
    numbers: Counter[str] = Counter()
    numbered = []
    for name in names:
        numbered.append(f"{name}[{numbers[name]}]" if 1 < counts[name] <= _MOST_PARTS else name)
        numbers[name] += 1
    return numbered
