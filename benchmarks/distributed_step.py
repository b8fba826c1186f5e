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
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

from benchmarks.measure import peak_extra_bytes, ratios
from benchmarks.rivals import STEPS, bfloat16_is
from benchmarks.tables import table
from hf_muon import Muon, orthogonalize
from hf_muon.math.precision import compute_dtype
from hf_muon.math.update import lr_scale

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
COEFFICIENTS = "original"  # torch.optim.Muon supports no other preset


QWEN3_LAYER = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)]
SHAPES: dict[str, list[tuple[int, int]]] = {
    "8 of 256x1024": [(256, 1024)] * 8,
    # Row counts that no number of ranks divides, fewer rows than ranks, and few matrices of equal shape.
    "uneven": [
        *[(250, 1000), (513, 257), (3, 500), (257, 513), (250, 1000)],
        *[(1000, 250), (63, 63), (333, 130), (250, 1000)],
    ],
    "tiny": [(32, 64), (48, 32), (32, 64)],  # to check that everything runs
    "Qwen3-0.6B, 4 layers": QWEN3_LAYER * 4,
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


def _case(shapes: list[tuple[int, int]], setting: Setting, device: torch.device, limit_s: float) -> list[str]:
    """Return a table of all optimizers for some shapes in one layout."""

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

    seconds = {name: [max(ranks) for ranks in zip(*gathered(own), strict=True)] for name, own in times.items()}
    rows = []
    for name, own in seconds.items():
        middle, least, most = (f"{1e3 * number:.3g}" for number in (median(own), min(own), max(own)))
        peak = max(gathered(peak_extra_bytes(steps[name], device)))
        parted = _farthest(weights[name], weights[OURS]) / moved
        ratio = median(ratios(own, seconds[OURS]))
        rows.append([name, f"{middle} ({least}-{most})", f"{ratio:.2f}", f"{peak / 1e6:.1f}", f"{parted:.0e}"])
    rows += [[name, f"fails: {why}", *[""] * 3] for name, why in failed.items()]
    title = f"{setting.dtype_name} products, medians of {rounds} rounds (least-greatest):"
    return [title, "", *table(["optimizer", "step ms", "x ours", "peak extra MB", "parted"], rows)]


def _farthest(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def _rank(rank: int, ranks: int, folder: str, args: argparse.Namespace) -> None:
    """Measure every case in one process of the group; rank 0 prints the tables."""
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
    dtype = compute_dtype("auto", device.type, device.index)
    for layout, shapes in itertools.product(args.layout, args.shapes):
        setting = Setting(mesh, layout == "fsdp", dtype)
        lines = _case(SHAPES[shapes], setting, device, args.seconds)
        if rank == 0:
            print(f"{ranks} ranks, {layout}, {shapes}, {lines[0]}", *lines[1:], sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layout", nargs="+", choices=["fsdp", "ddp"], default=["fsdp", "ddp"])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=list(SHAPES)[:2])
    parser.add_argument("--seconds", type=float, default=15, help="of each case; at least 3 rounds run")
    args = parser.parse_args()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, folder, args), nprocs=ranks)


if __name__ == "__main__":
    main()
