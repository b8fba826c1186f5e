"""What rank 0 says about the steps of an optimizer: how the first one is taken, and metrics of every N-th.

RMS cover this rank's shard of each matrix, orthogonality errors the whole matrices that it orthogonalizes. There is no
communication, and tensors of the step are not modified.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hf_muon.diagnostics import log
from hf_muon.diagnostics.measures import adamw_sum_of_squares, orthogonality_error, sum_of_squares
from hf_muon.math.adamw import MOMENTS_OF_ADAMW
from hf_muon.math.moments import decoded, decoded_chunks
from hf_muon.math.momentum import BUFFER
from hf_muon.optimizer import reports
from hf_muon.optimizer.groups import number_of
from hf_muon.optimizer.layout import GroupWork, StepLayout
from hf_muon.optimizer.partitioned import PartitionedStep
from hf_muon.rules import registry
from hf_muon.storage.partitions import Partitions
from hf_muon.storage.tensors import has_data, local_of

if TYPE_CHECKING:
    from hf_muon.distributed.units import Piece, Unit

Group = Mapping[str, Any]
_F = TypeVar("_F", bound=Callable[..., Any])

# Of one weight. More matrices, as with `per_head`, share a mean.
_MOST_PARTS = 8


def _harmless(method: _F) -> _F:
    """Let no error of diagnostics end a step: other ranks have none, and would wait for this one."""

    @functools.wraps(method)
    def guarded(self: Diagnostics, *args: Any, **kwargs: Any) -> Any:
        if not self.every and self._report is None:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  of memory, for example
            reason = f"{type(error).__name__}: {error}"
            return self._stop(f"no more metrics: they cannot be measured ({reason}) [metrics-failed]")

    return guarded  # type: ignore[return-value]


class Diagnostics:
    """The report of an optimizer's first step, if `HF_MUON_STEP_REPORT` asks for it, and metrics.

    A step calls `begin`, for each of its groups `of_group` and what measures a group, and `end`. A framework that steps
    one flat partition after the other does so for each.

    Args:
        every: steps from one line of metrics to the next; 0 for none. Ranks other than 0 have none.
        file: file to append to; None for `muon_diagnostics.jsonl` in the working directory.
    """

    def __init__(self, every: int = 0, file: str | os.PathLike[str] | None = None) -> None:
        self.every = every if log.is_rank_zero() else 0
        self.file = Path(file or log.FILE)
        self._report: dict[int, list[str]] | None = {}
        """The report's entries, by the id of a parameter; None when it was logged, or is not wanted."""
        self._step = 0
        self._after: int | None = 0
        """The number of steps before the lines to come, which begin a run in the file or continue one; None within."""
        self._names: list[str] = []
        self._summary: dict[str, float] = {}
        # Of the step that is measured: its line, and what stays on the devices until it ends.
        self._line: dict[str, Any] | None = None
        self._rates: dict[str, float] = {}
        self._measured: dict[tuple[str, str, Hashable], tuple[Tensor, int]] = {}
        # Of the group that is measured.
        self._group: Group = {}
        self._params: list[str] = []
        self._matrices: list[str] = []

    @_harmless
    def begin(
        self, groups: Sequence[Group], partitioned: PartitionedStep, layout: StepLayout, *, is_idle: bool
    ) -> None:
        """Begin a step, or a part of one; nothing has moved.

        Args:
            groups: param groups.
            partitioned: the flat partitions in them.
            layout: the layout of the groups' parameters.
            is_idle: whether the step may only create state; the report waits for the next one.
        """
        if self._report is not None and not is_idle:
            self._add_to_report(self._report, groups, layout, partitioned.partitions or {})
        # Fake tensors and those of the meta device have no values.
        if not self.every or not all(has_data(local_of(param)) for group in groups for param in group["params"][:1]):
            return
        # A framework that steps one partition after the other empties the other groups.
        step = next(number_of(group) for group in groups if group["params"])
        if step not in (self._step, self._step + 1):
            self._go_on_after(step - 1)
        self._step = step
        if partitioned.begins_step(groups):
            self._line = {"step": step, "parameters": {}} if step % self.every == 0 else None
            self._rates, self._measured = {}, {}

    def _add_to_report(
        self, report: dict[int, list[str]], groups: Sequence[Group], layout: StepLayout, partitions: Partitions
    ) -> None:
        """Add the parameters in the groups, and log the report when all of a step are there."""
        if not log.report_wanted() or not log.is_rank_zero():
            self._report = None
            return
        report.update(reports.first_step(groups, layout, partitions))
        if not report.keys() >= set(map(id, partitions)):
            return
        self._report = None
        world = "one process, no process group"
        if log.has_process_group():
            world = f"{torch.distributed.get_world_size()} processes, {torch.distributed.get_backend()}"
        # Parameters that differ in nothing but their layer share an entry.
        counts = Counter(entry for entries in report.values() for entry in entries).items()
        entries = [entry.replace("\n", f"  ({count} of them)\n", 1) if count > 1 else entry for entry, count in counts]
        log.logger().info("%s", "\n".join([f"the first step of Muon, as rank 0 sees it ({world}):", *entries]))

    @_harmless
    def of_group(
        self, k: int, groups: Sequence[Group], work: GroupWork, partitioned: PartitionedStep
    ) -> Diagnostics | None:
        """Return what measures the step of the group at position `k`: this object, or None if it is not measured."""
        if self._line is None:
            return None
        group = groups[k]
        params, names, rate = group["params"], group.get("param_names"), float(group["lr"])
        if partitioned.partitions is not None:
            names = [f"{len(names or ())} parameters, weight decay {group['weight_decay']:g}"] * len(params)
        self._group, self._params = group, names or [f"group {k}, parameter {i}" for i in range(len(params))]
        self._line["muon_lr" if group["use_muon"] else "adamw_lr"] = rate
        self._matrices = _numbered([matrix.name or self._params[matrix.param] for matrix in work.matrices])
        for name, matrix in zip(self._matrices, work.matrices, strict=True):
            self._line["parameters"][name], self._rates[name] = matrix.shape, rate * matrix.factor
        if not group["use_muon"]:
            for name, runs in zip(self._params, work.factors or [[(slice(0, None), 1.0)]] * len(params), strict=True):
                # The parameters in a partition are measured together, whatever their factors.
                factor = runs[0][1] if len(runs) == 1 else 1.0
                self._line["parameters"][name], self._rates[name] = (), rate * factor
        return self

    def _add(self, measure: str, name: str, value: Tensor, weight: int, place: Hashable = None) -> None:
        """Add to the sum of a measure's values, to be divided by the sum of `weight`; for RMS, the sum of squares.

        Args:
            measure: its name.
            name: the name of a matrix or parameter.
            value: a sum over a part of it.
            weight: the number of elements, or of matrices, in this part; without any, nothing is added.
            place: the part, if it may be measured again in this step: the last value counts.
        """
        if weight:
            self._measured[measure, name, len(self._measured) if place is None else place] = value, weight

    @_harmless
    def orthogonalized(self, unit: Unit, directions: Tensor) -> None:
        """Measure directions ``(B, m, n)`` on the rank that has made them; rules may make several for one unit."""
        counts = [each.stop - each.start for each in unit.ranges]
        errors = torch.split(orthogonality_error(directions), counts)
        for each, count, of_range in zip(unit.ranges, counts, errors, strict=True):
            place = each.matrix, each.start
            self._add("orthogonality_error", self._matrices[each.matrix], of_range.sum(), count, place)

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
            name = self._matrices[piece.matrix]
            self._add("update_rms", name, sum_of_squares(direction) * scale**2, direction.numel())
            self._add("weight_rms", name, sum_of_squares(weight), weight.numel())

    @_harmless
    def momentum(self, moments: Mapping[int, Mapping[str, Tensor]], hyperparameters: Group) -> None:
        """Measure this rank's part of the momentum of matrices after the step, and record options that rules change."""
        for matrix, stored in moments.items():
            buffer = decoded(stored, BUFFER)
            self._add("momentum_rms", self._matrices[matrix], sum_of_squares(buffer), buffer.numel())
        if self._line and any(rule.hyperparameters is not None for rule in registry.rules_of(self._group)):
            self._line |= {f"muon_{key}": float(hyperparameters[key]) for key in ("momentum", "weight_decay")}

    @_harmless
    def adamw(self, param: int, weight: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Measure this rank's part of a parameter and of its moments after the step; local tensors."""
        name, options = self._params[param], (self._group["adamw_betas"], self._group["adamw_eps"])
        self._add("adamw_weight_rms", name, sum_of_squares(weight), weight.numel())
        for chunk in decoded_chunks(moments, MOMENTS_OF_ADAMW):
            first, second = chunk["exp_avg"], chunk["exp_avg_sq"]
            squares = adamw_sum_of_squares(first, second, moments["step"], *options)
            self._add("adamw_update_rms", name, squares, first.numel())

    @_harmless
    def end(self, logits: Mapping[str, float], clipped: int, *, complete: bool) -> None:
        """End a step, or a part of one.

        Args:
            logits: the largest of each attention, by its name, if they are measured.
            clipped: number of heads whose rows were rescaled because of them.
            complete: whether no other part follows.
        """
        if self._line is None or not self._measured or not complete:
            return
        values, line, self._line = self._read(), self._line, None
        names = list(line["parameters"])
        if names == self._names:
            del line["parameters"]
        self._names = names
        for measure, by_name in values.items():
            line[measure] = [_short(by_name.get(name)) for name in names]
        self._summary = {}
        # Of the median: one matrix that begins at zero would dominate a mean.
        if updates := values.get("relative_update"):
            self._summary["muon/relative_update"] = statistics.median(updates.values())
        if errors := values.get("orthogonality_error"):
            self._summary["muon/orthogonality_error"] = math.fsum(errors.values()) / len(errors)
        if logits:
            line |= {"max_logit": {name: _short(value) for name, value in logits.items()}, "clipped_heads": clipped}
            self._summary |= {"muon/max_logit": max(logits.values()), "muon/clipped_heads": clipped}
        self._write("step", line)

    def _read(self) -> dict[str, dict[str, float]]:
        """Return each measure by name, with one read from a device."""
        tensors = [value for value, _ in self._measured.values()]
        numbers = torch.stack([value.to(tensors[0].device) for value in tensors]).tolist()
        sums: dict[str, dict[str, list[float]]] = {}
        for ((measure, name, _), (_, weight)), number in zip(self._measured.items(), numbers, strict=True):
            total = sums.setdefault(measure, {}).setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + number, total[1] + weight
        values = {
            measure: {
                name: math.sqrt(total / weight) if measure.endswith("_rms") else total / weight
                for name, (total, weight) in by_name.items()
            }
            for measure, by_name in sums.items()
        }
        for prefix in ("", "adamw_"):
            updates, weights = values.get(f"{prefix}update_rms", {}), values.get(f"{prefix}weight_rms", {})
            relative = {n: self._rates[n] * update / weights[n] for n, update in updates.items() if weights.get(n)}
            if relative:
                values[f"{prefix}relative_update"] = relative
        return values

    def pop_summary(self) -> dict[str, float]:
        """Return the summary of the last measured step, to be logged as `muon/...`; empty on a second call."""
        summary, self._summary = self._summary, {}
        return summary

    # --- the file

    def record_log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Write the logs of a Trainer, such as the loss, at the optimizer's step.

        Args:
            step: the optimizer's own count, which is not 0 before its first step if it was loaded.
            logs: what the Trainer logs.
        """
        if step and not self._step:
            self._go_on_after(step)
        numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float)) and "/" not in key}
        self._write("log", {"step": self._step, **{key: _short(value) for key, value in numbers.items()}})

    def _go_on_after(self, step: int) -> None:
        """Begin a run in the file, or continue its last one, after the optimizer has made some steps."""
        self._step = self._after = step

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        if not self.every:
            return
        lines = [{"event": event, **values}]
        if self._after is not None:
            lines.insert(0, {"event": "start", "after": self._after})
            log.logger().info("metrics every %d steps: %s", self.every, self.file)
            self._after = None
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab+") as out:
                # A run that was killed may have left half a line.
                if out.seek(0, os.SEEK_END) and not (out.seek(-1, os.SEEK_END), out.read(1) == b"\n")[1]:
                    out.write(b"\n")
                for line in lines:
                    out.write(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        except OSError as error:  # a full disk must not end the run
            self._stop(f"no more metrics: {self.file} cannot be written ({error}) [metrics-not-written]")

    def _stop(self, reason: str) -> None:
        """Measure, write and report nothing more, and say why."""
        self.every, self._report, self._line, self._measured = 0, None, None, {}
        log.logger().warning(reason)


def _short(value: float | None) -> float | None:
    """Return a number rounded to six digits; None for None, and for NaN and infinity, which JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _numbered(names: Sequence[str]) -> list[str]:
    """Return the names of matrices, with numbers where a few matrices have the same parameter."""
    counts, numbers = Counter(names), defaultdict[str, "itertools.count[int]"](itertools.count)
    return [f"{name}[{next(numbers[name])}]" if 1 < counts[name] <= _MOST_PARTS else name for name in names]
