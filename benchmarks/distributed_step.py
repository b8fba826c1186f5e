"""Measure one Muon step on several ranks, of hf_muon and of three others: time, products, bytes and memory in one run.

python benchmarks/distributed_step.py --ranks 2 4 --layout fsdp ddp --dion /path/to/dion

Ranks are processes of this machine: on gloo, or on NCCL if each has a GPU. Gradients are random, and no model runs. In
each round every side takes one step, and each round starts with another side; warm-up rounds are not counted. FLOPs,
bytes and memory come from separate steps, which are not timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

# Set before torch is imported; ranks inherit it. Ranks share cores, and dion's torch.compile would need a compiler and
# take minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meters import Ledger, Stopwatch, commit, machine, peak_extra_bytes, spread, uncompiled
from rich.console import Console
from rich.table import Table
from sides import STEPS, Setting, gathered, prepare, sides, stored, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_muon.math import cost
from hf_muon.math.precision import compute_dtype

OURS, REDUNDANT = "hf_muon", "full_tensor"


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
        (250, 1000),
        (513, 257),
        (3, 500),
        (257, 513),
        (250, 1000),
        (1000, 250),
        (63, 63),
        (333, 130),
        (250, 1000),
    ],
    "Qwen3-0.6B, 4 layers": [*QWEN3_LAYER] * 4,
    "tiny": [(32, 64), (48, 32), (32, 64)],  # does all run?
}
_BY_DEFAULT = list(SHAPES)[:3]


def main() -> None:
    args = _arguments()
    console = Console(stderr=True)
    report: dict[str, Any] = {"machine": _machine(args), "cases": []}
    for ranks in args.ranks:
        console.print(f"== {ranks} ranks", style="bold")
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, folder, vars(args)), nprocs=ranks)
            with open(os.path.join(folder, "cases.json")) as file:
                report["cases"] += json.load(file)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(report, file, indent=1)
                file.write("\n")
    _show(report, Console(width=max(150, Console().width)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layout", nargs="+", choices=["fsdp", "ddp"], default=["fsdp", "ddp"])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=_BY_DEFAULT)
    parser.add_argument("--dion", help="a checkout of github.com/microsoft/dion")
    parser.add_argument("--ns-dtype", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--seconds", type=float, default=15, help="of each case; at least 3 rounds run")
    parser.add_argument("--out", help="where to write the figures as JSON")
    args = parser.parse_args()
    args.dion = args.dion and os.path.abspath(args.dion)
    return args


def _machine(args: argparse.Namespace) -> dict[str, Any]:
    return machine(
        gpu=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        dion=commit(args.dion) if args.dion else None,
    ) | {"torch.compile": "off" if os.environ["TORCHDYNAMO_DISABLE"] == "1" else "on"}


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
    chosen = args["ns_dtype"]
    dtype = compute_dtype(chosen, device.type, device.index)
    cases = []
    for layout in args["layout"]:
        setting = Setting(mesh, layout == "fsdp", dtype, stopwatch.wrap, args["dion"])
        if not cases:
            prepare(setting)
        for shapes in args["shapes"]:
            begin = time.perf_counter()
            figures = _case(SHAPES[shapes], setting, device, stopwatch, args["seconds"])
            if rank == 0:
                cases.append({"ranks": ranks, "layout": layout, "shapes": shapes, **figures})
                print(f"{layout}, {shapes}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
            else:
                cases.append({})
    if rank == 0:
        with open(os.path.join(folder, "cases.json"), "w") as file:
            json.dump(cases, file)
    dist.barrier()
    dist.destroy_process_group()


def _case(
    shapes: list[tuple[int, int]], setting: Setting, device: torch.device, stopwatch: Stopwatch, limit_s: float
) -> dict[str, Any]:
    """Return all figures for some shapes in one layout."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def parameters() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        with_grads = []
        for shape in shapes:
            value, grad = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
            param = nn.Parameter(stored(value, setting))
            param.grad = stored(grad, setting)
            with_grads.append(param)
        return with_grads

    def timed(step: Callable[[], Any]) -> tuple[float, float]:
        dist.barrier()
        synchronize()
        stopwatch.read()
        begin = time.perf_counter()
        step()
        synchronize()
        return time.perf_counter() - begin, stopwatch.read()

    steps: dict[str, Callable[[], Any]] = {}
    params: dict[str, list[nn.Parameter]] = {}
    for name, make in sides(setting).items():
        params[name] = parameters()
        steps[name] = make(params[name], setting)
    failed: dict[str, str] = {}
    for name in list(steps):  # the first step creates states and plans
        try:
            steps[name]()
        except RuntimeError as error:  # one that all ranks raise; any other ends in a timeout
            failed[name] = str(error).splitlines()[0]
            del steps[name], params[name]
    parted = _parted(params, parameters())

    names = list(steps)
    wall: dict[str, list[float]] = {name: [] for name in names}
    products: dict[str, list[float]] = {name: [] for name in names}
    step_times = {name: timed(step)[0] for name, step in steps.items()}
    if dist.get_rank() == 0:
        warm = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in step_times.items())
        print(f"   warm-up: {warm}", file=sys.stderr, flush=True)
    rounds = min(31, max(3, int(limit_s / gathered(sum(step_times.values()))[0])))
    for k in range(rounds):
        for j in range(len(names)):
            name = names[(j + k) % len(names)]
            step_s, products_s = timed(steps[name])
            wall[name].append(step_s)
            products[name].append(products_s)

    result: dict[str, Any] = {
        "elements": sum(rows * columns for rows, columns in shapes),
        "Newton-Schulz dtype": setting.dtype_name,
        "FLOPs of one rank alone": sum(_flops_of(shape, setting.dtype, device) for shape in shapes),
        "failed": failed,
        "sides": {},
    }
    for name in names:
        with uncompiled(), Ledger() as ledger:
            steps[name]()
        by_rank = gathered((wall[name], products[name], ledger.flops, ledger.nbytes, sum(ledger.collectives.values())))
        memory = gathered(peak_extra_bytes(steps[name], device))
        result["sides"][name] = {
            "step s": [max(times) for times in zip(*(each[0] for each in by_rank), strict=True)],
            "Newton-Schulz s": [sum(times) for times in zip(*(each[1] for each in by_rank), strict=True)],
            "FLOPs": [each[2] for each in by_rank],
            "bytes sent": [each[3] for each in by_rank],
            "collectives": by_rank[0][4],
            "collectives by kind": dict(ledger.collectives),
            "peak extra bytes": max(memory),
            "parted": parted[name],
        }
    del steps, params
    return result


def _parted(params: dict[str, list[nn.Parameter]], before: list[nn.Parameter]) -> dict[str, float]:
    """Return the largest distance of each side's weights from ours after a step, relative to the largest movement."""
    mine = [whole(param) for param in params[OURS]]
    moved = max(float((after - whole(param)).abs().max()) for after, param in zip(mine, before, strict=True))
    return {
        name: max(float((whole(p) - w).abs().max()) for p, w in zip(some, mine, strict=True)) / moved
        for name, some in params.items()
    }


def _flops_of(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> int:
    rows = cost.block_rows(min(shape), dtype, device.type)
    return cost.flops(shape, cost.segments(shape, STEPS, dtype), rows)


def _show(report: dict[str, Any], console: Console) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in report["machine"].items() if value))
    for case in report["cases"]:
        console.print(_table(case))
        for line in _verdict(case):
            console.print("  " + line)


def _table(case: dict[str, Any]) -> Table:
    rounds = len(case["sides"][OURS]["step s"])
    title = f"{case['ranks']} ranks, {case['layout']}, {case['shapes']}: medians of {rounds} (min-max)"
    table = Table(title=title, title_justify="left", caption=f"{case['Newton-Schulz dtype']} products")
    columns = ("step ms", "x ours", "NS ms, all ranks", "x ours", "NS GFLOP", "MB sent", "calls", "peak MB", "parted")
    for column in ("side", *columns):
        table.add_column(column, justify="left" if column == "side" else "right", no_wrap=column == "side")
    for name, side in case["sides"].items():
        sent = side["bytes sent"]
        mean = sum(sent) / len(sent)
        table.add_row(
            name,
            _ms(side["step s"]),
            f"{_ratio(case, name, 'step s')['median']:.2f}",
            _ms(side["Newton-Schulz s"]),
            f"{_ratio(case, name, 'Newton-Schulz s')['median']:.2f}",
            f"{max(side['FLOPs']) / 1e9:.2f}",
            f"{mean / 1e6:.2f}" + (f", root {max(sent) / 1e6:.2f}" if max(sent) > 1.5 * mean else ""),
            str(side["collectives"]),
            f"{side['peak extra bytes'] / 1e6:.1f}",
            f"{side['parted']:.0e}",
        )
    for name, reason in case["failed"].items():
        table.add_row(name, f"fails: {reason}")
    return table


def _ms(seconds: list[float]) -> str:
    times = spread(seconds)
    return f"{times['median'] * 1e3:.0f} ({times['min'] * 1e3:.0f}-{times['max'] * 1e3:.0f})"


def _ratio(case: dict[str, Any], name: str, figure: str) -> dict[str, float]:
    """Return the spread of the ratio of a side's figure to ours, taken round by round."""
    mine = case["sides"][OURS][figure]
    return spread([other / own for other, own in zip(case["sides"][name][figure], mine, strict=True)])


def _verdict(case: dict[str, Any]) -> list[str]:
    """Return in words which targets are reached."""
    lines = []
    target = {2: 1.8, 4: 3.0}.get(case["ranks"])
    ratio = _ratio(case, REDUNDANT, "Newton-Schulz s")
    line = f"Newton-Schulz time, {REDUNDANT} over ours: {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
    lines.append(line + (f"; target {target}: {_word(ratio['median'] >= target)}" if target else ""))
    if "dion" in case["sides"]:
        ratio = _ratio(case, "dion", "step s")
        lines.append(
            f"step, dion over ours: {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f}); target 1: "
            f"{_word(ratio['median'] >= 1)}"
        )
    return lines


def _word(holds: bool) -> str:
    return "holds" if holds else "does not hold"


if __name__ == "__main__":
    main()
