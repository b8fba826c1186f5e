"""Measure one Muon step on several ranks, of hf_muon and of two simpler ways: time and memory.

    python -m benchmarks.distributed_step --ranks 2 4 --layout fsdp ddp

Ranks are processes of this machine, on gloo, or on NCCL if each has a GPU. Gradients are random, and no model runs.
Optimizers take turns; each round starts with another one. Memory comes from a separate step. `hf-muon plan` computes
FLOPs and bytes.

All optimizers average gradients with Nesterov momentum, take five Newton-Schulz steps with the same coefficients,
scale by ``0.2 sqrt(max(out, in))``, and apply decoupled weight decay. ``parted``, the largest distance from our weights
after a step relative to the largest movement, shows if one of them differs in more than rounding.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# Set before torch is imported; ranks inherit it, and share cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.measure import machine, peak_extra_bytes, ratios
from benchmarks.rivals import STEPS, bfloat16_is
from benchmarks.tables import table
from hf_muon import Muon, orthogonalize
from hf_muon.math.precision import compute_dtype
from hf_muon.math.update import lr_scale

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
COEFFICIENTS = "original"  # torch.optim.Muon supports no other preset


def llama(layers: int, width: int) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a Llama, layer by layer; one key and value head serves four query heads."""
    inner = -(-8 * width // 3 // 64) * 64
    layer = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    return [*layer, (inner, width), (inner, width), (width, inner)] * layers


QWEN3_LAYER = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)]
SHAPES: dict[str, list[tuple[int, int]]] = {
    "8 of 256x1024": [(256, 1024)] * 8,
    "Llama, 24 layers of 192": llama(24, 192),
    # Row counts that no number of ranks divides, fewer rows than ranks, and few matrices of equal shape.
    "uneven": [
        *[(250, 1000), (513, 257), (3, 500), (257, 513), (250, 1000)],
        *[(1000, 250), (63, 63), (333, 130), (250, 1000)],
    ],
    "Qwen3-0.6B, 4 layers": QWEN3_LAYER * 4,
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
    """

    mesh: Any
    sharded: bool
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]


Step = Callable[[], Any]


def ours(params: Sequence[nn.Parameter], setting: Setting, **options: Any) -> Step:
    """Return the step of this package's optimizer."""
    group = None if setting.sharded else setting.mesh.get_group()
    own = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_coefficients": COEFFICIENTS, "ns_steps": STEPS}
    return Muon(params, **own, ns_dtype=setting.dtype_name, replicate_group=group, **options).step


def full_tensor(params: Sequence[nn.Parameter], setting: Setting) -> Step:
    """Return a step in which every rank gathers and orthogonalizes every update, as in LLaMA-Factory's v1.

    Then rank 0 sends each rank its part of the direction, which is the default of `distribute_tensor`.
    """
    buffers = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step() -> None:
        for param, buffer in zip(params, buffers, strict=True):
            buffer.mul_(MOMENTUM).add_(param.grad)
            update = param.grad.add(buffer, alpha=MOMENTUM)
            sharded = isinstance(update, DTensor)
            whole_update = update.full_tensor() if sharded else update
            direction = orthogonalize(
                whole_update, ns_coefficients=COEFFICIENTS, ns_steps=STEPS, ns_dtype=setting.dtype_name
            )
            if sharded:
                direction = distribute_tensor(direction, param.device_mesh, param.placements)
            param.mul_(1 - LR * DECAY)
            param.add_(direction, alpha=-LR * lr_scale("match_rms_adamw", param.shape))

    return step


def torch_muon(params: Sequence[nn.Parameter], setting: Setting) -> Step:
    """Return the step of torch.optim.Muon, in which DTensor chooses what to gather."""
    own = {"weight_decay": DECAY, "momentum": MOMENTUM, "ns_steps": STEPS, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = torch.optim.Muon(params, lr=LR, **own)

    def step() -> None:
        with bfloat16_is(setting.dtype):
            optimizer.step()

    return step


OURS = "hf_muon"


def optimizers(setting: Setting) -> dict[str, Callable[[Sequence[nn.Parameter], Setting], Step]]:
    """Return all optimizers by name, ours first."""
    return {
        OURS: ours,
        "hf_muon, comm_dtype: bf16": functools.partial(ours, comm_dtype="bf16"),
        "full_tensor": full_tensor,
        "torch.optim.Muon": torch_muon,
    }


# --- what is measured


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


def _case(shapes: list[tuple[int, int]], setting: Setting, device: torch.device, limit_s: float) -> dict[str, Any]:
    """Return the figures of all optimizers for some shapes in one layout."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def timed(step: Step) -> float:
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        return time.perf_counter() - begin

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
    times: dict[str, list[float]] = {name: [] for name in names}
    warm_up = sum(timed(step) for step in steps.values())
    rounds = min(31, max(3, int(limit_s / gathered(warm_up)[0])))
    for k in range(rounds):
        first = k % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timed(steps[name]))

    figures: dict[str, Any] = {}
    for name in names:
        seconds = zip(*gathered(times[name]), strict=True)
        figures[name] = {
            "step s": [max(ranks) for ranks in seconds],
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
    dtype = compute_dtype(args["ns_dtype"], device.type, device.index)
    cases = []
    for layout in args["layout"]:
        setting = Setting(mesh, layout == "fsdp", dtype)
        for shapes in args["shapes"]:
            begin = time.perf_counter()
            figures = _case(SHAPES[shapes], setting, device, args["seconds"])
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

    ours_s = case["sides"][OURS]["step s"]
    rows = [
        [
            *(name, ms(own["step s"]), f"{median(ratios(own['step s'], ours_s)):.2f}"),
            *(f"{own['peak extra bytes'] / 1e6:.1f}", f"{own['parted']:.0e}"),
        ]
        for name, own in case["sides"].items()
    ]
    rows += [[name, f"fails: {why}", *[""] * 3] for name, why in case["failed"].items()]
    heads = ["optimizer", "step ms", "x ours", "peak extra MB", "parted"]
    rounds = len(ours_s)
    title = f"{case['ranks']} ranks, {case['layout']}, {case['shapes']}, {case['Newton-Schulz dtype']} products"
    return [f"{title}, medians of {rounds} rounds (least-greatest):", "", *table(heads, rows)]


def main() -> None:
    """Start the ranks, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layout", nargs="+", choices=["fsdp", "ddp"], default=["fsdp", "ddp"])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=list(SHAPES)[:3])
    parser.add_argument("--ns-dtype", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--seconds", type=float, default=15, help="of each case; at least 3 rounds run")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report: dict[str, Any] = {"machine": machine(gpu=gpus), "cases": []}
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
