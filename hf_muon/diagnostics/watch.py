"""What is measured in one step, and when steps begin and end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_muon.diagnostics.measures import (
    adamw_sum_of_squares,
    orthogonality_error,
    stable_rank,
    sum_of_squares,
)


class Watch:
    """Measurements of one step. Values stay on their devices until `read`."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rates: dict[str, float] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.logits: dict[str, float] = {}
        self.clipped = 0
        self._rate_of: dict[str, float] = {}
        self._factor_of: dict[str, float] = {}
        self._keys: list[tuple[str, str, int]] = []
        self._values: list[Tensor] = []

    def _add(self, measure: str, name: str, value: Tensor, weight: int) -> None:
        if weight:
            self._keys.append((measure, name, weight))
            self._values.append(value)

    def muon(self, names: Mapping[int, str], shapes: Mapping[int, tuple[int, ...]], lr: float) -> None:
        """Note the matrices of a Muon group, by position, and its learning rate."""
        self.rates["muon_lr"] = lr
        self._rate_of.update(dict.fromkeys(names.values(), lr))
        self.shapes.update({name: shapes[k] for k, name in names.items()})

    def options_of_step(self, options: Mapping[str, float]) -> None:
        """Note the values that options of Muon groups have in this step, where rules may change them."""
        self.rates.update({f"muon_{name}": value for name, value in options.items()})

    def rate_factors(self, factors: Mapping[str, float]) -> None:
        """Note the factors by which the learning rates of some matrices and parameters are multiplied."""
        self._factor_of.update(factors)

    def momentum(self, name: str, buffer: Tensor) -> None:
        """Measure what this rank stores of a momentum, after its update."""
        self._add("momentum_rms", name, sum_of_squares(buffer), buffer.numel())

    def direction(self, name: str, piece: Tensor, scale: float, weight: Tensor) -> None:
        """Measure a piece of a direction, and the weights that will move by it.

        Args:
            name: of the matrix.
            piece: before it is scaled.
            scale: factor that multiplies it, the learning rate aside.
            weight: the same piece of the weights, before the step.
        """
        self._add("update_rms", name, sum_of_squares(piece) * scale**2, piece.numel())
        self._add("weight_rms", name, sum_of_squares(weight), weight.numel())

    def updates(self, counts: Sequence[tuple[str, int]], updates: Tensor) -> None:
        """Measure whole matrices before they are orthogonalized.

        Args:
            counts: names, each with its number of matrices, in the order of the batch.
            updates: ``(B, m, n)``.
        """
        self._add_batch("stable_rank", counts, stable_rank(updates))

    def orthogonalized(self, counts: Sequence[tuple[str, int]], directions: Tensor) -> None:
        """Measure directions ``(B, m, n)`` of whole matrices; see `updates`."""
        self._add_batch("orthogonality_error", counts, orthogonality_error(directions))

    def _add_batch(self, measure: str, counts: Sequence[tuple[str, int]], values: Tensor) -> None:
        for (name, count), own in zip(counts, torch.split(values, [count for _, count in counts]), strict=True):
            self._add(measure, name, own.sum(), count)

    def adamw_weight(self, name: str, weight: Tensor) -> None:
        """Measure what this rank stores of a parameter that AdamW has stepped."""
        self._add("adamw_weight_rms", name, sum_of_squares(weight), weight.numel())

    def adamw(self, name: str, state: Mapping[str, Tensor], betas: Sequence[float], eps: float, lr: float) -> None:
        """Measure the AdamW update of what this rank stores of a parameter, after its moments' update."""
        self.rates["adamw_lr"] = lr
        self._rate_of[name] = lr
        self.shapes.setdefault(name, ())
        moments = state["exp_avg"], state["exp_avg_sq"]
        squares = adamw_sum_of_squares(*moments, state["step"], betas, eps)
        self._add("adamw_update_rms", name, squares, moments[0].numel())

    def attentions(self, logits: Mapping[str, float], clipped: int) -> None:
        """Note the largest logit of each attention, by its name, and how many heads were rescaled because of them."""
        self.logits, self.clipped = dict(logits), clipped

    def read(self) -> dict[str, dict[str, float]]:
        """Return each measure by name, with one read per device."""
        numbers: list[float] = [0.0] * len(self._values)
        by_device: dict[torch.device, list[int]] = {}
        for i, value in enumerate(self._values):
            by_device.setdefault(value.device, []).append(i)
        for indices in by_device.values():
            for i, number in zip(indices, torch.stack([self._values[i] for i in indices]).tolist(), strict=True):
                numbers[i] = number
        sums: dict[tuple[str, str], tuple[float, int]] = {}
        for (measure, name, weight), number in zip(self._keys, numbers, strict=True):
            total, weights = sums.get((measure, name), (0.0, 0))
            sums[measure, name] = total + number, weights + weight
        means: dict[str, dict[str, float]] = {}
        for (measure, name), (total, weight) in sums.items():
            mean = total / weight
            means.setdefault(measure, {})[name] = math.sqrt(mean) if measure.endswith("_rms") else mean
        for prefix in ("", "adamw_"):
            updates, weights_of = means.get(f"{prefix}update_rms", {}), means.get(f"{prefix}weight_rms", {})
            relative = {
                name: self._rate_of[name] * self._factor_of.get(name, 1.0) * update / weights_of[name]
                for name, update in updates.items()
                if weights_of.get(name)
            }
            if relative:
                means[f"{prefix}relative_update"] = relative
        return means


class Clock:
    """Times of optimizer steps: CUDA events, which do not block the host, or wall-clock time on other devices."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Record this moment."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two recorded moments, both of which have passed."""
        return float(begin.elapsed_time(end)) / 1e3 if self._on_cuda else float(end - begin)
