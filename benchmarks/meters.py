"""What a distributed optimizer step costs on one rank: time, products, traffic, memory."""

from __future__ import annotations

import datetime
import functools
import math
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Stopwatch:
    """Time inside the functions that it wraps, until it is read.

    On a CPU it is processor time of the calling thread: ranks that share cores would otherwise be billed for one
    another's work. With one thread per rank it is all the work there is. On CUDA it is the time between two events.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

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
        """Seconds since it was last read. On CUDA, call it after a synchronization."""
        seconds = self._seconds + sum(begin.elapsed_time(end) / 1e3 for begin, end in self._events)
        self._seconds, self._events = 0.0, []
        return seconds


def _flat(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [t for some in tensors for t in _flat(some)]


def _nbytes(tensors: Any) -> float:
    return float(sum(tensor.numel() * tensor.itemsize for tensor in _flat(tensors)))


def _has_subclass(types: Any) -> bool:
    """Whether DTensor or the like is among them: it first takes itself apart, and what it calls comes back."""
    return any(t is not Tensor and not issubclass(t, torch.nn.Parameter) for t in types)


class Ledger(TorchDispatchMode):
    """Counts matrix products and collectives below DTensor, as they reach local tensors and process groups.

    Bytes are those that this rank sends, by the usual costs on a ring of W ranks: n bytes of its own to an all-gather
    cost (W-1) n, a reduce-scatter of n bytes (W-1)/W n, an all-reduce 2 (W-1)/W n, a broadcast or a reduce (W-1)/W n
    (the mean over the ranks). An all-to-all costs what is for other ranks, a scatter is paid by its root. All groups
    are taken to hold all ranks.
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
        elif name == "scatter":  # only the root has anything to scatter
            cost = sum(_nbytes(part) for part in args[1]) * share
        else:
            raise NotImplementedError(f"no rule for what the collective {name} costs")
        self.collectives[name] += 1
        self.nbytes += cost


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Held(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still alive, looked at after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_subclass(types):
            return NotImplemented
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # neither a view nor written in place
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return out


def peak_extra_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of tensors held at once during a call, above what was held before it.

    On a CPU: what operations return, for as long as it lives. What they use inside is not in it, nor what the
    communication library allocates. (The profiler's memory events do not serve: a buffer that the library's own thread
    gives up last is never seen to go.) On CUDA: the caching allocator's peak.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Held() as held:
        function()
    return held.peak


def newton_schulz_flops(shape: tuple[int, int], steps: int) -> int:
    """Multiplications and additions in the standard form: ``4 s^2 l + 2 s^3`` a step for sides ``s <= l``."""
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of the values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else math.fsum(ordered[middle - 1 : middle + 1]) / 2
    return {"median": median, "min": ordered[0], "max": ordered[-1]}


def commit(path: str) -> str:
    """What a checkout is at."""
    command = ["git", "-C", path, "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def machine(**versions: Any) -> dict[str, Any]:
    """What figures depend on, with what else is named."""
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
