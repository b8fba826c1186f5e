"""Measurements of one step, and a clock for steps."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor


class Watch:
    """Measurements of one step. Values stay on their devices until `read`.

    Attributes:
        step: its number.
        numbers: the numbers about the whole step, by name.
        shapes: the shapes of matrices, by name; ``()`` for parameters of AdamW.
        options: the options of Muon and of AdamW.
        logits: the largest of each attention, by its name, if they are measured.
        clipped: number of heads whose rows were rescaled because of them.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.numbers: dict[str, float] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.logits: dict[str, float] = {}
        self.clipped = 0
        self._rates: dict[str, float] = {}
        self._measured: list[tuple[str, str, Tensor, int]] = []

    def moves(self, name: str, shape: tuple[int, ...], rate: float) -> None:
        """Record a matrix, or a parameter of AdamW, and the learning rate of its step."""
        self.shapes[name], self._rates[name] = shape, rate

    def add(self, measure: str, name: str, value: Tensor, weight: int) -> None:
        """Add to the sum of a measure's values, to be divided by the sum of `weight`; for RMS, the sum of squares."""
        if weight:
            self._measured.append((measure, name, value, weight))

    def read(self) -> dict[str, dict[str, float]]:
        """Return each measure by name, with one read per device."""
        by_device: dict[torch.device, list[tuple[str, str, Tensor, int]]] = {}
        for entry in self._measured:
            by_device.setdefault(entry[2].device, []).append(entry)
        sums: dict[tuple[str, str], tuple[float, int]] = {}
        for measured in by_device.values():
            numbers = torch.stack([value for _, _, value, _ in measured]).tolist()
            for (measure, name, _, weight), number in zip(measured, numbers, strict=True):
                total, weights = sums.get((measure, name), (0.0, 0))
                sums[measure, name] = total + number, weights + weight
        means: dict[str, dict[str, float]] = {}
        for (measure, name), (total, weight) in sums.items():
            mean = total / weight
            means.setdefault(measure, {})[name] = math.sqrt(mean) if measure.endswith("_rms") else mean
        for prefix in ("", "adamw_"):
            updates, weights_of = means.get(f"{prefix}update_rms", {}), means.get(f"{prefix}weight_rms", {})
            relative = {
                name: self._rates[name] * update / weights_of[name]
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
