"""What a run of the benchmarks has in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from timing import Clock, Gemm

Row = dict[str, Any]


@dataclass
class Setting:
    """Where and how is measured.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: of our products there, by ``ns_dtype: auto``.
        rounds: turns that each side takes.
        quick: shapes so small that the numbers mean nothing, to see that all runs.
        dion: a checkout of microsoft/dion.
        missing: sides that do not run here, with the reason; filled as they are found missing.
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
        """A line of progress."""
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)


def attempt(function: Callable[[], Any]) -> str:
    """Why a side does not run on this input; empty when it does."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 another package's trouble is a line in the report
        return f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return ""
