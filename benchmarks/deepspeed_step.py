"""One training step of two ranks under DeepSpeed ZeRO: hf_muon beside DeepSpeed's own Muon, and beside AdamW.

python benchmarks/deepspeed_step.py --out benchmarks/deepspeed_step.json

Ranks are processes of this machine, on gloo. In each round every side takes one step, and each round starts with
another side; warm-up rounds are not counted. Bytes and memory come from separate steps, which are not timed.
Newton-Schulz alone is measured first, beside the products that it consists of.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import deepspeed_sides as sides
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed_sides import ADAMW, NATIVE, NATIVE_STANDARD, OURS
from meters import Ledger, newton_schulz_flops, peak_extra_bytes, spread, uncompiled

from hf_muon.math import cost
from hf_muon.math.coefficients import resolve
from hf_muon.math.newton_schulz import newton_schulz

MATRICES, WIDTH, INNER = 8, 256, 1024
BATCH, LENGTH = 4, 32  # of each rank
CASES = [(2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")]
ALL = (OURS, NATIVE, NATIVE_STANDARD, ADAMW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-adam", action="store_true", help="compile DeepSpeedCPUAdam, for minutes, and measure it")
    parser.add_argument("--out", help="where to write the figures as JSON")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "machine": sides.machine(),
        "matrices": f"{MATRICES} of {WIDTH}x{INNER}",
        "tokens per step": 2 * BATCH * LENGTH,
        "Newton-Schulz": [products(shape, args.rounds) for shape in ((512, 2048), (WIDTH, INNER))],
    }
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (2, folder, args.rounds, args.cpu_adam), nprocs=2)
        with open(os.path.join(folder, "cases.json")) as file:
            report["cases"] = json.load(file)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    print(text(report))


def products(shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Return the processor time of Newton-Schulz on one matrix, and of the same number of products of these shapes."""
    torch.set_num_threads(1)
    rows, columns = shape
    coefficients = resolve("original", sides.STEPS)
    matrix = torch.randn(1, rows, columns)
    x, gram = torch.randn(rows, columns) / columns, torch.randn(rows, rows) / rows
    square, wide = torch.empty(rows, rows), torch.empty(rows, columns)

    def bare() -> None:
        for _ in range(sides.STEPS):
            torch.mm(x, x.T, out=square)
            torch.mm(gram, gram, out=square)
            torch.mm(gram, x, out=wide)

    functions: dict[str, Callable[[], Any]] = {
        "Newton-Schulz s": lambda: newton_schulz(
            matrix, coefficients, torch.float32, lengths=(1,) * sides.STEPS, rows=cost.BlockRows(min(shape), min(shape))
        ),
        "products s": bare,
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    for k in range(2 * rounds + 2):
        for name in list(functions) if k % 2 else reversed(list(functions)):
            begin = time.thread_time()
            functions[name]()
            if k >= 2:
                times[name].append(time.thread_time() - begin)
    return {"shape": shape, "dtype": "fp32", "FLOPs": newton_schulz_flops(shape, sides.STEPS), **times}


def _rank(rank: int, ranks: int, folder: str, rounds: int, cpu_adam: bool) -> None:
    """Measure every case in one process of the group; rank 0 writes the figures."""
    sides.start(rank, ranks, folder)
    cases = []
    for stage, offload in CASES:
        begin = time.perf_counter()
        # For an offloaded optimizer, AdamW is DeepSpeedCPUAdam, in C++.
        names = [name for name in ALL if name != ADAMW or offload == "none" or cpu_adam]
        cases.append({"stage": stage, "offload": offload, "sides": _case(names, stage, offload, rank, rounds)})
        if rank == 0:
            print(f"ZeRO-{stage}, {offload}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
            with open(os.path.join(folder, "cases.json"), "w") as file:
                json.dump(cases, file)
    dist.barrier()
    dist.destroy_process_group()


def _case(names: list[str], stage: int, offload: str, rank: int, rounds: int) -> dict[str, Any]:
    """Return all figures of one stage, for each side."""
    zero = {} if offload == "none" else {"offload_optimizer": {"device": offload}}
    engines = {}
    for name in names:
        torch.manual_seed(0)
        model = sides.Mlp(WIDTH, [INNER] * (MATRICES // 2))
        engines[name] = sides.engine(name, model, stage, zero, 0.0, BATCH)
    batch = sides.tokens(rank, BATCH, LENGTH)

    def timed(engine: Any) -> tuple[float, float]:
        """Return the seconds of forward and backward, and of the step."""
        dist.barrier()
        begin = time.perf_counter()
        engine.backward(engine(batch))
        dist.barrier()
        middle = time.perf_counter()
        engine.step()
        return middle - begin, time.perf_counter() - middle

    def both(engine: Any) -> None:
        engine.backward(engine(batch))
        engine.step()

    times_of: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for k in range(rounds + 2):
        for j in range(len(names)):
            name = names[(j + k) % len(names)]
            seconds = timed(engines[name])
            if k >= 2:
                times_of[name].append(seconds)
    by_side: dict[str, Any] = {}
    for name in names:
        with uncompiled(), Ledger() as ledger:
            both(engines[name])
        peak = peak_extra_bytes(lambda engine=engines[name]: both(engine), torch.device("cpu"))  # type: ignore[misc]
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, (times_of[name], ledger.nbytes, ledger.flops, peak))
        times = list(zip(*(each[0] for each in by_rank), strict=True))
        by_side[name] = {
            "backward s": [max(one[0] for one in ranks) for ranks in times],
            "step s": [max(one[1] for one in ranks) for ranks in times],
            "bytes sent": [each[1] for each in by_rank],
            "FLOPs": [each[2] for each in by_rank],
            "collectives by kind": dict(ledger.collectives),
            "peak extra bytes": max(each[3] for each in by_rank),
        }
    for engine in engines.values():
        engine.destroy()
    return by_side


def text(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [", ".join(f"{key} {value}" for key, value in report["machine"].items()), ""]
    for case in report["Newton-Schulz"]:
        ratio = spread([a / b for a, b in zip(case["Newton-Schulz s"], case["products s"], strict=True)])
        speed = case["FLOPs"] / spread(case["products s"])["median"] / 1e9
        rows, columns = case["shape"]
        lines.append(
            f"Newton-Schulz of {rows}x{columns}: {spread(case['Newton-Schulz s'])['median'] * 1e3:.0f} ms, "
            f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f}) of its bare products at {speed:.0f} GFLOP/s"
        )
    for case in report["cases"]:
        where = "" if case["offload"] == "none" else f" + {case['offload']}"
        lines += ["", f"ZeRO-{case['stage']}{where}", ""]
        lines += [
            "| side | whole ms | x ours | step ms | x ours | GFLOP, busiest rank | MB sent per rank | peak extra MB |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, side in case["sides"].items():
            mine = case["sides"][OURS]
            cells = []
            for figures, own in ((_whole(side), _whole(mine)), (side["step s"], mine["step s"])):
                ratio = spread([a / b for a, b in zip(figures, own, strict=True)])
                at = spread(figures)
                cells += [f"{at['median'] * 1e3:.0f} ({at['min'] * 1e3:.0f}-{at['max'] * 1e3:.0f})"]
                cells += [f"{ratio['median']:.2f}"]
            sent = sum(side["bytes sent"]) / len(side["bytes sent"])
            cells += [f"{max(side['FLOPs']) / 1e9:.2f}", f"{sent / 1e6:.2f}", f"{side['peak extra bytes'] / 1e6:.1f}"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _whole(side: dict[str, Any]) -> list[float]:
    return [a + b for a, b in zip(side["backward s"], side["step s"], strict=True)]


if __name__ == "__main__":
    main()
