"""The setting that all benchmarks of a run share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from timing import Clock, Gemm

from hf_muon.math.precision import compute_dtype

Row = dict[str, Any]


@dataclass
class Setting:
    """Where and how to measure.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: of our products on this device, by ``ns_dtype: auto``.
        clock: measures seconds.
        gemm: the rate of plain products.
        rounds: number of measured rounds.
        quick: use tiny shapes to check that everything runs; the numbers mean nothing.
        dion: a checkout of microsoft/dion.
        missing: sides that do not run here, with the reason; benchmarks add to it.
        began: when the run began, in seconds of `time.monotonic`.
    """

    device: torch.device
    dtype: torch.dtype
    clock: Clock
    gemm: Gemm
    rounds: int
    quick: bool = False
    dion: str | None = None
    missing: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)


def setting_on(kind: str, *, quick: bool, rounds: int, threads: int = 1, dion: str | None = None) -> Setting:
    """Return the setting on a kind of device, ``cpu`` or ``cuda``, whose rate of products is measured."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    dtype = compute_dtype("auto", device.type, device.index)
    clock = Clock(device, threads)
    sizes = (64,) if quick else (512, 768, 1024) if kind == "cpu" else (4096, 8192, 16384)
    return Setting(device, dtype, clock, Gemm(clock, dtype, sizes), rounds, quick, dion)


def attempt(function: Callable[[], Any]) -> str:
    """Call a function and return why it does not run; an empty text if it does."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 an error of another package becomes a line in the report
        return f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return ""
