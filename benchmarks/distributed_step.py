"""Measure one Muon step on several ranks, of hf_muon and of three others: time, products, bytes and memory.

    python -m benchmarks.distributed_step --ranks 2 4 --layout fsdp ddp --dion PATH_TO_CHECKOUT

Ranks are processes of this machine, on gloo, or on NCCL if each has a GPU. Gradients are random, and no model runs.
Optimizers take turns; each round starts with another one. FLOPs, bytes and memory come from separate steps, which are
not timed.

All optimizers average gradients with Nesterov momentum, take five Newton-Schulz steps with the same coefficients,
scale by ``0.2 sqrt(max(out, in))``, and apply decoupled weight decay. ``parted``, the largest distance from our weights
after a step relative to the largest movement, shows if one of them differs in more than rounding.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

# Set before torch is imported; ranks inherit it. Ranks share cores, and dion's torch.compile would need a compiler and
# take minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import hf_muon.math.newton_schulz
from benchmarks.bench import add_dion
from benchmarks.measure import commit, has_subclass, machine, peak_extra_bytes, ratios, uncompiled
from benchmarks.rivals import STEPS, bfloat16_is
from benchmarks.tables import table
from hf_muon import Muon
from hf_muon.math.coefficients import resolve
from hf_muon.math.precision import compute_dtype
from hf_muon.math.update import lr_scale

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
COEFFICIENTS = "original"  # torch.optim.Muon supports no other preset


def llama(layers: int, width: int) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a Llama, layer by layer; one key and value head serves four query heads."""
    inner = -(-8 * width // 3 // 64) * 64
    layer = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    return [*layer, (inner, width), (inner, width), (width, inner)] * layers


_QWEN3_LAYER = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)]
SHAPES: dict[str, list[tuple[int, int]]] = {
    "8 of 256x1024": [(256, 1024)] * 8,
    "Llama, 24 layers of 192": llama(24, 192),
    # Row counts that no number of ranks divides, fewer rows than ranks, and few matrices of equal shape.
    "uneven": [
        *[(250, 1000), (513, 257), (3, 500), (257, 513), (250, 1000)],
        *[(1000, 250), (63, 63), (333, 130), (250, 1000)],
    ],
    "Qwen3-0.6B, 4 layers": _QWEN3_LAYER * 4,
    "tiny": [(32, 64), (48, 32), (32, 64)],  # to check that everything runs
}


# --- the optimizers


@dataclass(frozen=True)
class Setting:
    """The ranks, the storage and the products of a comparison.

    Attributes:
        mesh: one-dimensional, over all ranks.
        sharded: whether parameters are DTensors, or plain and replicated.
        dtype: of the products.
        timed: wraps the function whose time counts as Newton-Schulz.
        dion: a checkout of microsoft/dion, or None.
    """

    mesh: Any
    sharded: bool
    dtype: torch.dtype
    timed: Callable[[Callable[..., Any]], Callable[..., Any]]
    dion: str | None = None

    @property
    def dtype_name(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]

    def orthogonalize(self, matrices: Tensor) -> Tensor:
        """Orthogonalize ``(m, n)`` or ``(B, m, n)`` with our timed Newton-Schulz, for optimizers of other packages."""
        batch = matrices if matrices.ndim == 3 else matrices.unsqueeze(0)
        coefficients = resolve(COEFFICIENTS, STEPS)
        return hf_muon.math.newton_schulz.newton_schulz(batch, coefficients, self.dtype).view(matrices.shape)


Step = Callable[[], Any]


def ours(params: Sequence[nn.Parameter], setting: Setting, **options: Any) -> Step:
    """Return the step of this package's optimizer."""
    group = None if setting.sharded else setting.mesh.get_group()
    own = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_coefficients": COEFFICIENTS, "ns_steps": STEPS}
    return Muon(params, **own, ns_dtype=setting.dtype_name, replicate_group=group, **options).step


def full_tensor(params: Sequence[nn.Parameter], setting: Setting, *, scatter: bool) -> Step:
    """Return a step in which every rank gathers every update and orthogonalizes all of them.

    With `scatter`, rank 0 sends each rank its part of the direction, the default of `distribute_tensor` and what
    LLaMA-Factory's v1 does. Without it, each rank keeps its part of the direction that it has computed.
    """
    buffers = [torch.zeros_like(param) for param in params]
    source = 0 if scatter else None

    @torch.no_grad()
    def step() -> None:
        for param, buffer in zip(params, buffers, strict=True):
            buffer.mul_(MOMENTUM).add_(param.grad)
            update = param.grad.add(buffer, alpha=MOMENTUM)
            sharded = isinstance(update, DTensor)
            direction = setting.orthogonalize(update.full_tensor() if sharded else update)
            if sharded:
                direction = distribute_tensor(direction, param.device_mesh, param.placements, src_data_rank=source)
            param.mul_(1 - LR * DECAY)
            param.add_(direction, alpha=-LR * lr_scale("match_rms_adamw", param.shape))

    return step


def torch_muon(params: Sequence[nn.Parameter], setting: Setting) -> Step:
    """Return the step of torch.optim.Muon, in which DTensor chooses what to gather."""
    module = importlib.import_module("torch.optim._muon")
    if not hasattr(module._zeropower_via_newtonschulz, "__wrapped__"):
        module._zeropower_via_newtonschulz = setting.timed(module._zeropower_via_newtonschulz)
    own = {"weight_decay": DECAY, "momentum": MOMENTUM, "ns_steps": STEPS, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = torch.optim.Muon(params, lr=LR, **own)

    def step() -> None:
        with bfloat16_is(setting.dtype):
            optimizer.step()

    return step


def dion(params: Sequence[nn.Parameter], setting: Setting) -> Step:
    """Return the step of microsoft/dion's Muon, from a checkout, with our Newton-Schulz. It always sends bf16."""
    if setting.dion and setting.dion not in sys.path:
        sys.path.insert(0, setting.dion)

    def newton_schulz(matrices: Tensor, epsilon: Any = None) -> Tensor:
        return setting.orthogonalize(matrices).to(matrices.dtype)

    own = {"lr": LR, "mu": MOMENTUM, "weight_decay": DECAY, "nesterov": True, "adjust_lr": "rms_norm"}
    where = setting.mesh if setting.sharded else setting.mesh.get_group()
    module = importlib.import_module("dion.muon")
    return module.Muon(params, where, **own, use_triton=False, newton_schulz_func=newton_schulz).step  # type: ignore[no-any-return]


OURS = "hf_muon"


def optimizers(setting: Setting) -> dict[str, Callable[[Sequence[nn.Parameter], Setting], Step]]:
    """Return all optimizers by name, ours first."""
    by_name: dict[str, Any] = {
        OURS: ours,
        "hf_muon, comm_dtype: bf16": functools.partial(ours, comm_dtype="bf16"),
        "full_tensor": functools.partial(full_tensor, scatter=True),
        "full_tensor, no scatter": functools.partial(full_tensor, scatter=False),
        "torch.optim.Muon": torch_muon,
        "dion": dion,
    }
    if not setting.sharded:
        del by_name["full_tensor, no scatter"]
    if not setting.dion:
        del by_name["dion"]
    return by_name


# --- what is measured


class Stopwatch:
    """Measures the time inside the functions that it wraps, until it is read.

    On a CPU: processor time of the calling thread, to which ranks on the same core do not add. On CUDA: time between
    two events.
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


def _nbytes(tensors: Any) -> float:
    if isinstance(tensors, Tensor):
        return float(tensors.nbytes)
    return sum(map(_nbytes, tensors))


class Ledger(TorchDispatchMode):
    """Counts matrix products and collectives below DTensor, as they reach local tensors and process groups.

    Bytes are those that this rank sends, by the usual costs on a ring of W ranks: an all-gather costs (W-1) n for n
    bytes of this rank, a reduce-scatter of n bytes (W-1)/W n, an all-reduce 2 (W-1)/W n, a broadcast or a reduce
    (W-1)/W n (the mean over the ranks). An all-to-all costs the bytes for other ranks, and a scatter costs only its
    root. Every process group is assumed to have all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.nbytes = 0.0
        self.collectives: Counter[str] = Counter()
        self._ranks = dist.get_world_size()
        self._rank = dist.get_rank()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_subclass(types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.split(".")[0].strip("_")
            if name not in ("wait_tensor", "wrap_tensor_autograd", "barrier"):
                self.collectives[name] += 1
                self.nbytes += self._cost(name, args)
        return out

    def _cost(self, name: str, args: Any) -> float:
        others = self._ranks - 1
        share = others / self._ranks
        if name == "alltoall_base":
            _, send, _, _, splits, *_ = args
            own = splits[self._rank] / max(1, len(send)) if splits else 1 / self._ranks
            return _nbytes(send) * (1 - own)
        if name == "all_to_all_single":
            send, _, splits, *_ = args
            return _nbytes(send) * (1 - splits[self._rank] / max(1, sum(splits)))
        if name == "alltoall":
            return sum(_nbytes(part) for rank, part in enumerate(args[1]) if rank != self._rank)
        which, factor = {
            "allgather_base": (1, others),
            "allgather": (1, others),
            "all_gather_into_tensor": (0, others),
            "reduce_scatter_base": (1, share),
            "reduce_scatter_tensor": (0, share),
            "allreduce": (0, 2 * share),
            "all_reduce": (0, 2 * share),
            "broadcast": (0, share),
            "reduce": (0, share),
            "scatter": (1, share),
        }[name]
        return factor * _nbytes(args[which])


def whole(param: Tensor) -> Tensor:
    """Return the whole value of a parameter, on all ranks."""
    value = param.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _parameters(shapes: list[tuple[int, int]], setting: Setting, device: torch.device) -> list[nn.Parameter]:
    """Return equal random parameters with gradients on each call, stored as the setting stores them."""
    generator = torch.Generator().manual_seed(0)

    def stored(shape: tuple[int, int]) -> Tensor:
        value = torch.randn(shape, generator=generator).to(device)
        return distribute_tensor(value, setting.mesh, [Shard(0)], src_data_rank=None) if setting.sharded else value

    params = []
    for shape in shapes:
        params.append(nn.Parameter(stored(shape)))
        params[-1].grad = stored(shape)
    return params


def _case(
    shapes: list[tuple[int, int]], setting: Setting, device: torch.device, stopwatch: Stopwatch, limit_s: float
) -> dict[str, Any]:
    """Return the figures of all optimizers for some shapes in one layout."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def timed(step: Step) -> tuple[float, float]:
        dist.barrier()
        synchronize()
        stopwatch.read()
        begin = time.perf_counter()
        step()
        synchronize()
        return time.perf_counter() - begin, stopwatch.read()

    steps: dict[str, Step] = {}
    weights: dict[str, list[Tensor]] = {}
    failed: dict[str, str] = {}
    for name, make in optimizers(setting).items():
        params = _parameters(shapes, setting, device)
        step = make(params, setting)
        try:
            step()  # creates state and plans
        except RuntimeError as error:  # one that all ranks raise; any other ends in a timeout
            failed[name] = str(error).splitlines()[0]
            continue
        steps[name], weights[name] = step, [whole(param) for param in params]
    start = [whole(param) for param in _parameters(shapes, setting, device)]
    moved = _farthest(weights[OURS], start)

    names = list(steps)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    warm_up = sum(timed(step)[0] for step in steps.values())
    rounds = min(31, max(3, int(limit_s / gathered(warm_up)[0])))
    for k in range(rounds):
        first = k % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timed(steps[name]))

    figures: dict[str, Any] = {}
    for name in names:
        with uncompiled(), Ledger() as ledger:
            steps[name]()
        by_rank = gathered((times[name], ledger.flops, ledger.nbytes))
        by_round = list(zip(*(each[0] for each in by_rank), strict=True))
        figures[name] = {
            "step s": [max(step_s for step_s, _ in ranks) for ranks in by_round],
            "Newton-Schulz s": [sum(products_s for _, products_s in ranks) for ranks in by_round],
            "FLOPs": [each[1] for each in by_rank],
            "bytes sent": [each[2] for each in by_rank],
            "collectives": dict(ledger.collectives),
            "peak extra bytes": max(gathered(peak_extra_bytes(steps[name], device))),
            "parted": _farthest(weights[name], weights[OURS]) / moved,
        }
    return {"Newton-Schulz dtype": setting.dtype_name, "failed": failed, "sides": figures}


def _farthest(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def _rank(rank: int, ranks: int, folder: str, args: dict[str, Any]) -> None:
    """Measure every case in one process of the group; rank 0 writes the figures."""
    on_cuda = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.disable(logging.WARNING)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=5),
    )
    mesh = init_device_mesh(device.type, (ranks,))
    stopwatch = Stopwatch(device)
    dtype = compute_dtype(args["ns_dtype"], device.type, device.index)
    hf_muon.math.newton_schulz.newton_schulz = stopwatch.wrap(hf_muon.math.newton_schulz.newton_schulz)
    cases = []
    for layout in args["layout"]:
        setting = Setting(mesh, layout == "fsdp", dtype, stopwatch.wrap, args["dion"])
        for shapes in args["shapes"]:
            begin = time.perf_counter()
            figures = _case(SHAPES[shapes], setting, device, stopwatch, args["seconds"])
            cases.append({"ranks": ranks, "layout": layout, "shapes": shapes, **figures})
            if rank == 0:
                print(f"{layout}, {shapes}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    if rank == 0:
        Path(folder, "cases.json").write_text(json.dumps(cases))
    dist.barrier()
    dist.destroy_process_group()


# --- the tables


def _lines(case: dict[str, Any]) -> list[str]:
    """Return the table of a case."""

    def ms(seconds: list[float]) -> str:
        return f"{1e3 * median(seconds):.3g} ({1e3 * min(seconds):.3g}-{1e3 * max(seconds):.3g})"

    def over_ours(figures: dict[str, Any], figure: str) -> str:
        return f"{median(ratios(figures[figure], case['sides'][OURS][figure])):.2f}"

    rows = [
        [
            *(name, ms(own["step s"]), over_ours(own, "step s")),
            *(ms(own["Newton-Schulz s"]), over_ours(own, "Newton-Schulz s")),
            *(f"{max(own['FLOPs']) / 1e9:.2f}", f"{mean(own['bytes sent']) / 1e6:.2f}"),
            *(str(sum(own["collectives"].values())), f"{own['peak extra bytes'] / 1e6:.1f}", f"{own['parted']:.0e}"),
        ]
        for name, own in case["sides"].items()
    ]
    rows += [[name, f"fails: {why}", *[""] * 8] for name, why in case["failed"].items()]
    heads = ["optimizer", "step ms", "x ours", "Newton-Schulz ms, all ranks", "x ours", "GFLOP, busiest rank"]
    heads += ["MB sent, mean of ranks", "collectives", "peak extra MB", "parted"]
    rounds = len(case["sides"][OURS]["step s"])
    title = f"{case['ranks']} ranks, {case['layout']}, {case['shapes']}, {case['Newton-Schulz dtype']} products"
    return [f"{title}, medians of {rounds} rounds (least-greatest):", "", *table(heads, rows)]


def main() -> None:
    """Start the ranks, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layout", nargs="+", choices=["fsdp", "ddp"], default=["fsdp", "ddp"])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=list(SHAPES)[:3])
    add_dion(parser)
    parser.add_argument("--ns-dtype", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--seconds", type=float, default=15, help="of each case; at least 3 rounds run")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report: dict[str, Any] = {"machine": machine(gpu=gpus, dion=commit(args.dion) if args.dion else None), "cases": []}
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, folder, vars(args)), nprocs=ranks)
            cases = json.loads(Path(folder, "cases.json").read_text())
        report["cases"] += cases
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(*(line for case in cases for line in _lines(case)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
