"""Measure what a distributed optimizer step costs on one rank: time, products, traffic, memory."""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import platform
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Stopwatch:
    """Measures the time inside the functions that it wraps, until it is read.

    On a CPU that is processor time of the calling thread, to which ranks on the same core do not add. With one thread
    per rank it covers all work. On CUDA it is the time between two events.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` and adds its time."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._on_cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                result = function(*args, **kwargs)
                end.record()
                self._events.append((begin, end))
                return result
            begin_s = time.thread_time()
            result = function(*args, **kwargs)
            self._seconds += time.thread_time() - begin_s
            return result

        return timed

    def read(self) -> float:
        """Return the seconds since the last call, and reset them. On CUDA, synchronize before the call."""
        seconds = self._seconds + sum(begin.elapsed_time(end) / 1e3 for begin, end in self._events)
        self._seconds, self._events = 0.0, []
        return seconds


def _flat(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [t for some in tensors for t in _flat(some)]


def _nbytes(tensors: Any) -> float:
    return float(sum(tensor.numel() * tensor.itemsize for tensor in _flat(tensors)))


def _has_subclass(types: Any) -> bool:
    """Return whether a subclass such as DTensor is among the types; its operations dispatch again on local tensors."""
    return any(t is not Tensor and not issubclass(t, torch.nn.Parameter) for t in types)


class Ledger(TorchDispatchMode):
    """Counts matrix products and collectives below DTensor, as they reach local tensors and process groups.

    Bytes are those that this rank sends, by the usual costs on a ring of W ranks: an all-gather costs (W-1) n for n
    bytes of this rank, a reduce-scatter of n bytes (W-1)/W n, an all-reduce 2 (W-1)/W n, a broadcast or a reduce
    (W-1)/W n (the mean over the ranks). An all-to-all costs the bytes for other ranks, and a scatter costs its root
    alone. Every process group is assumed to have all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.nbytes = 0.0
        self.collectives: Counter[str] = Counter()
        self._ranks = dist.get_world_size()
        self._rank = dist.get_rank()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_subclass(types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func.__name__.split(".")[0].strip("_"), args)
        return out

    def _collective(self, name: str, args: Any) -> None:
        others = self._ranks - 1
        share = others / self._ranks
        if name in ("wait_tensor", "wrap_tensor_autograd", "barrier"):
            return
        if name == "alltoall_base":
            _, send, _, _, splits, *_ = args
            rows = len(send) if send.ndim else 1
            own = splits[self._rank] / max(1, rows) if splits else 1 / self._ranks
            cost = _nbytes(send) * (1 - own)
        elif name == "all_to_all_single":
            send, _, splits, *_ = args
            cost = _nbytes(send) * (1 - splits[self._rank] / max(1, sum(splits)))
        elif name == "alltoall":
            cost = sum(_nbytes(part) for rank, part in enumerate(args[1]) if rank != self._rank)
        elif name in ("allgather_base", "allgather"):
            cost = others * _nbytes(args[1])
        elif name == "all_gather_into_tensor":
            cost = others * _nbytes(args[0])
        elif name in ("reduce_scatter_base",):
            cost = share * _nbytes(args[1])
        elif name == "reduce_scatter_tensor":
            cost = share * _nbytes(args[0])
        elif name in ("allreduce", "all_reduce"):
            cost = 2 * share * _nbytes(args[0])
        elif name in ("broadcast", "reduce"):
            cost = share * _nbytes(args[0])
        elif name == "scatter":  # only the root sends anything
            cost = sum(_nbytes(part) for part in args[1]) * share
        else:
            raise NotImplementedError(f"no rule for what the collective {name} costs")
        self.collectives[name] += 1
        self.nbytes += cost


class _LiveLocalBytes(LiveBytes):
    """Measures the peak of tensors below DTensor, as `Ledger` counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if _has_subclass(types) else super().__torch_dispatch__(func, types, args, kwargs)


def peak_extra_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the peak of the bytes of tensors during a call, above those before it.

    On a CPU this counts the tensors that operations return, while they live, without the memory inside operations and
    that of the communication library. (The profiler's memory events miss it when the library's own thread frees a
    buffer.) On CUDA it is the peak of the caching allocator.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveLocalBytes() as live:
        function()
    return live.peak


def kernels(function: Callable[[], Any], device: torch.device) -> dict[str, tuple[int, float]]:
    """Return how often each kernel, copy and fill runs in a call, and its seconds, by name, as torch's profiler sees.

    On a CPU these are operators, those inside others included.

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
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") in kinds:
            count, seconds = found.get(event["name"], (0, 0.0))
            found[event["name"]] = (count + 1, seconds + event.get("dur", 0) / 1e6)
    if not found:
        raise RuntimeError("torch's profiler saw nothing on the device")
    return found


def uncompiled() -> Any:
    """Return a context in which compiled functions run uncompiled, for calls under a mode that sees each operator.

    Where torch meets such a mode otherwise, it does not compile a function again for the rest of the process.
    """
    return torch.compiler.set_stance("force_eager")


def newton_schulz_flops(shape: tuple[int, int], steps: int) -> int:
    """Return the FLOPs of the standard form: ``4 s^2 l + 2 s^3`` per step for sides ``s <= l``."""
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum of the values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else math.fsum(ordered[middle - 1 : middle + 1]) / 2
    return {"median": median, "min": ordered[0], "max": ordered[-1]}


def commit(path: str) -> str:
    """Return the commit of a checkout, as `git describe` names it."""
    command = ["git", "-C", path, "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def machine(**versions: Any) -> dict[str, Any]:
    """Return the machine, the versions and the load that figures depend on, and the versions in `versions`."""
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{os.cpu_count()} cores of {model}",
        "torch": torch.__version__,
        "hf_muon": commit(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        **versions,
        "load": os.getloadavg()[0],
        "threads per rank": os.environ["OMP_NUM_THREADS"],
    }
