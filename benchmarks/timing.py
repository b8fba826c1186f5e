"""Times of sides that take turns, beside the products that the machine can do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from meters import spread
from torch.utils.flop_counter import FlopCounterMode

_SHORTEST = 4e-3  # seconds; what takes less is called several times and timed together
GEMM = "gemm"


@dataclass(frozen=True)
class Clock:
    """Seconds that a call takes.

    On a CPU with one thread: processor time of that thread, which other programs do not add to. With several threads:
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
        """Of one of `times` calls."""
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
    """Seconds of each side in each round. Every side has run before; the order turns by one from round to round."""
    names = list(sides)
    times = {}
    for name in names:
        sides[name]()  # compiles, allocates
        times[name] = min(1000, max(1, math.ceil(_SHORTEST / max(clock.seconds(sides[name]), 1e-7))))
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(clock.seconds(sides[name], times[name]))
    return found


class Gemm:
    """The rate of square products on this machine in a dtype, at the size that is fastest here.

    Attributes:
        size: rows of the product.
        rate: FLOPs a second, the best of the sizes, median of a few.
    """

    def __init__(self, clock: Clock, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        rates = {}
        for size in sizes:
            multiply = self._product(size, clock.device, dtype)
            found = taking_turns({GEMM: multiply}, clock, 5)[GEMM]
            rates[size] = 2 * size**3 / spread(found)["median"]
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
        """Of the rate, in each round; the rate is that of the same round, since clocks and neighbours change."""
        return [(flops / own) / (self.flops / product) for own, product in zip(seconds, products, strict=True)]


def executed_flops(function: Callable[[], Any]) -> int:
    """FLOPs of the products of a call, as they are done. Of kernels that torch does not know it sees nothing.

    Zero, too, where what is compiled does not run while it counts.
    """
    try:
        with FlopCounterMode(display=False) as counter:
            function()
    except Exception:  # noqa: BLE001 another package's trouble is an empty cell
        return 0
    return int(counter.get_total_flops())


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Within rounds."""
    return [a / b for a, b in zip(over, under, strict=True)]


def columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest as three columns of a table."""
    found = spread(list(values))
    return {name: found["median"], f"{name} min": found["min"], f"{name} max": found["max"]}
