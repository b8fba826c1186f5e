"""Measure calls that take turns: seconds, FLOPs and memory here, launches and waits as on an accelerator."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_muon.math.precision import compute_dtype
from tests.support.accelerated import as_accelerator
from tests.support.count import counting
from tests.support.live_bytes import LiveBytes

Row = dict[str, Any]
GEMM = "gemm"
_SHORTEST = 4e-3  # seconds; shorter calls are timed several at a time
_ROOT = Path(__file__).resolve().parents[1]


# --- seconds


@dataclass(frozen=True)
class Clock:
    """Measures the seconds that a call takes.

    With one thread on a CPU: processor time of that thread, to which other programs do not add. With several threads:
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


def taking_turns(calls: Mapping[str, Callable[[], Any]], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each round, after a warm-up. Each round starts with another call."""
    names = list(calls)
    times = {}
    for name in names:
        calls[name]()  # compiles, allocates
        times[name] = min(1000, max(1, math.ceil(_SHORTEST / max(clock.seconds(calls[name]), 1e-7))))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(clock.seconds(calls[name], times[name]))
    return seconds


class Gemm:
    """A square product in a dtype, at whichever of some sizes is fastest on this machine.

    Attributes:
        size: number of rows of the product.
        rate: FLOPs per second, the median of five rounds.
        run: computes one product.
    """

    def __init__(self, clock: Clock, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        products = {size: self._product(size, clock.device, dtype) for size in sizes}
        rates = {
            size: 2 * size**3 / median(taking_turns({GEMM: run}, clock, 5)[GEMM]) for size, run in products.items()
        }
        self.size = max(rates, key=lambda size: rates[size])
        self.rate = rates[self.size]
        self.run = products[self.size]

    @staticmethod
    def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    def fractions(self, flops: float, seconds: Sequence[float], products: Sequence[float]) -> list[float]:
        """Return which fraction of the product's rate a call of `flops` reaches in each round."""
        return [flops / own / (2 * self.size**3 / product) for own, product in zip(seconds, products, strict=True)]


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratios of two calls, taken within rounds."""
    return [a / b for a, b in zip(over, under, strict=True)]


def columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of a figure as three columns of a table."""
    return {name: median(values), f"{name} min": min(values), f"{name} max": max(values)}


# --- what a call computes, keeps and launches


def uncompiled() -> Any:
    """Return a context in which compiled functions run uncompiled, for calls under a mode that sees each operator.

    Without it, torch stops compiling a function for the rest of the process when it meets such a mode.
    """
    return torch.compiler.set_stance("force_eager")


def executed_flops(function: Callable[[], Any]) -> int:
    """Return the FLOPs of the products that a call executes; 0 if it does not run while torch counts.

    Kernels of other packages are not counted.
    """
    try:
        with uncompiled(), FlopCounterMode(display=False) as counter:
            function()
    except Exception:  # noqa: BLE001 an error of another package becomes an empty entry
        return 0
    return int(counter.get_total_flops())


def peak_extra_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the peak memory of tensors during a call, above what was allocated before it, in bytes.

    On a CPU: tensors that operations return, without the memory inside operations. On CUDA: the peak of the caching
    allocator.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        function()
    return live.peak


def timeline(function: Callable[[], Any], device: torch.device) -> list[tuple[str, float, float]]:
    """Return name, beginning and seconds of each kernel, copy and fill of a call, from torch's profiler.

    On a CPU these are operators, nested ones included.

    Raises:
        RuntimeError: the profiler sees none, as where it may not read the device's counters.
    """
    on_cuda = device.type == "cuda"
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if on_cuda else {"cpu_op"}
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if on_cuda else [])]) as profile:
        function()
        if on_cuda:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [
        (event["name"], event["ts"] / 1e6, event.get("dur", 0) / 1e6) for event in events if event.get("cat") in kinds
    ]
    if not found:
        raise RuntimeError("torch's profiler saw nothing on the device")
    return found


def asked(make: Callable[[], Callable[[], Any]], weights: int) -> Row:
    """Count what a call would ask of an accelerator, on the meta device, and measure the host's time for it.

    Args:
        make: returns the call on meta tensors; its second run is counted.
        weights: divides the traffic, so that it is in bytes a weight.

    Returns:
        The columns ``launches``, ``waits``, ``traffic`` and ``host ms``; ``not counted`` if the call does not run on
        meta tensors, with the reason.
    """
    row: Row = {}

    def count() -> None:
        with uncompiled(), _fused_on_meta(), as_accelerator():
            call = make()
            with counting():  # answers reads of values
                call()
            with counting() as counts, as_accelerator(counts):
                call()
        row.update(launches=counts.launches.total(), waits=counts.waits.total())
        row.update(traffic=counts.traffic.total() / weights)

    def measure() -> None:
        with uncompiled(), _fused_on_meta(), as_accelerator(reads=False):
            call = make()
            call()
            seconds = []
            for _ in range(3):
                begin = time.process_time()
                call()
                seconds.append(time.process_time() - begin)
        row["host ms"] = 1e3 * min(seconds)

    note = attempt(count) or attempt(measure)
    return {**row, "not counted": note} if note else row


@contextlib.contextmanager
def _fused_on_meta() -> Iterator[None]:
    """Let torch's fused AdamW take meta tensors. Its kernel runs on them if the learning rate is a number."""
    module = importlib.import_module("torch.optim.optimizer")
    name = "_get_fused_kernels_supported_devices"
    kernel = torch._fused_adamw_

    def with_number(*args: Any, lr: Any, **kwargs: Any) -> Any:
        return kernel(*args, lr=0.0, **kwargs)  # any number

    with (
        mock.patch.object(module, name, return_value=[*getattr(module, name)(), "meta"]),
        mock.patch.object(torch, "_fused_adamw_", with_number),
    ):
        yield


def attempt(function: Callable[[], Any]) -> str:
    """Call a function and return why it does not run; an empty text if it does."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 an error of another package becomes a line in the report
        return f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return ""


# --- where it is measured


@dataclass
class Setting:
    """The device, the clock and the size of a run of benchmarks.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: of our products on this device, by ``ns_dtype: auto``.
        clock: measures seconds.
        gemm: the rate of plain products.
        rounds: number of measured rounds.
        quick: use tiny shapes to check that everything runs; the numbers mean nothing.
        dion: a checkout of microsoft/dion.
        missing: packages that do not run here, with the reason; benchmarks add to it.
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

    @property
    def half(self) -> torch.dtype:
        """The dtype of products in code that names bf16; a CPU without it in hardware takes ours."""
        return self.dtype if self.on_cpu else torch.bfloat16

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)


def setting_on(kind: str, *, quick: bool, rounds: int, threads: int = 1, dion: str | None = None) -> Setting:
    """Measure the rate of products on a kind of device, ``cpu`` or ``cuda``, and return its setting."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    dtype = compute_dtype("auto", device.type, device.index)
    clock = Clock(device, threads)
    sizes = (64,) if quick else (512, 768, 1024) if kind == "cpu" else (4096, 8192, 16384)
    return Setting(device, dtype, clock, Gemm(clock, dtype, sizes), rounds, quick, dion)


def commit(path: str | Path = _ROOT) -> str:
    """Return the commit of a checkout, as `git describe` names it."""
    command = ["git", "-C", str(path), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    installed = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def machine(**others: Any) -> Row:
    """Return the machine, the versions and the load that figures depend on, and `others`."""
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{os.cpu_count()} cores of {model}",
        "torch": torch.__version__,
        "hf_muon": commit(),
        **others,
        "load": os.getloadavg()[0],
        "threads per rank": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
    }
