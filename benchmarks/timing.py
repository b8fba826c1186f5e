"""Measure the times of sides that take turns, and the rate of plain products on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from meters import spread, uncompiled
from torch.utils.flop_counter import FlopCounterMode

_SHORTEST = 4e-3  # seconds; shorter calls are timed several at a time
GEMM = "gemm"


@dataclass(frozen=True)
class Clock:
    """Measures the seconds that a call takes.

    On a CPU with one thread: processor time of that thread, to which other programs do not add. With several threads:
    wall time. On CUDA: time between two events.
    """

    device: torch.device
    threads: int = 1

    @property
    def kind(self) -> str:
        if self.device.type == "cuda":
            return "time between CUDA events"
        return "processor time of the one thread" if self.threads == 1 else "wall time"

    def seconds(self, function: Callable[[], Any], times: int = 1) -> float:
        """Return the mean seconds of `times` calls."""
        if self.device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(self.device)
            begin.record()
            for _ in range(times):
                function()
            end.record()
            torch.cuda.synchronize(self.device)
            return begin.elapsed_time(end) / 1e3 / times
        now = time.thread_time if self.threads == 1 else time.perf_counter
        start = now()
        for _ in range(times):
            function()
        return (now() - start) / times


def taking_turns(sides: Mapping[str, Callable[[], Any]], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side in each round, after a warm-up; each round starts with another side."""
    names = list(sides)
    times = {}
    for name in names:
        sides[name]()  # compiles, allocates
        times[name] = min(1000, max(1, math.ceil(_SHORTEST / max(clock.seconds(sides[name]), 1e-7))))
    by_side: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            by_side[name].append(clock.seconds(sides[name], times[name]))
    return by_side


class Gemm:
    """Measures the rate of square products on this machine in a dtype, at the fastest of some sizes.

    Attributes:
        size: number of rows of the product.
        rate: FLOPs per second at that size, the median of five rounds.
        flops: FLOPs of one product.
        run: computes one product.
    """

    def __init__(self, clock: Clock, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        rates = {}
        for size in sizes:
            multiply = self._product(size, clock.device, dtype)
            product_s = taking_turns({GEMM: multiply}, clock, 5)[GEMM]
            rates[size] = 2 * size**3 / spread(product_s)["median"]
        self.size = max(rates, key=lambda size: rates[size])
        self.rate = rates[self.size]
        self.flops = 2 * self.size**3
        self.run = self._product(self.size, clock.device, dtype)

    @staticmethod
    def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    def fractions(self, flops: float, seconds: Sequence[float], products: Sequence[float]) -> list[float]:
        """Return which fraction of the product rate a side reaches in each round.

        Clock rates and other programs change the rate, so each round counts its own.

        Args:
            flops: of a call of the side.
            seconds: of the side, in each round.
            products: seconds of `run`, in each round.
        """
        return [(flops / own) / (self.flops / product) for own, product in zip(seconds, products, strict=True)]


def executed_flops(function: Callable[[], Any]) -> int:
    """Return the FLOPs of the products that a call executes, without kernels that torch does not know.

    The result is 0 if compiled code does not run while torch counts.
    """
    try:
        with uncompiled(), FlopCounterMode(display=False) as counter:
            function()
    except Exception:  # noqa: BLE001 an error of another package becomes an empty cell
        return 0
    return int(counter.get_total_flops())


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratios of two sides, taken within rounds."""
    return [a / b for a, b in zip(over, under, strict=True)]


def columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of a figure as three columns of a table."""
    figures = spread(list(values))
    return {name: figures["median"], f"{name} min": figures["min"], f"{name} max": figures["max"]}
