"""Measure how far training on two ranks of DeepSpeed ZeRO deviates from one process: hf_muon and DeepSpeed's own Muon.

python benchmarks/deepspeed_deviation.py --out benchmarks/deepspeed_deviation.json

The reference for each side is its own rule in one process: gradients of the whole batch, clipped, then the optimizer.
For DeepSpeed's Muon that is its own `muon_update` on whole matrices and torch's AdamW for the rest. Clipping reduces
the norm of the gradients to less than half. Everything is fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import deepspeed_sides as sides
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed_sides import NATIVE, OURS
from torch import Tensor, nn

from hf_muon import build_optimizer

BATCH, LENGTH, UPDATES = 8, 16, 10
CLIPPED = 1.0  # Trainer's default
LOSS = 50.0  # factor of the loss, which makes gradients large enough to clip; neither optimizer depends on it
CELLS = [(stage, offload) for stage in (0, 1, 2, 3) for offload in ("none", "cpu") if stage or offload == "none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", help="a folder for NVMe offload, which needs DeepSpeed's async_io (libaio)")
    parser.add_argument("--out", help="where to write the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (2, folder, args.nvme), nprocs=2)
        with open(os.path.join(folder, "cells.json")) as file:
            cells = json.load(file)
    report = {"machine": sides.machine(), "steps": UPDATES, "clipping": CLIPPED, "cells": cells}
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    print(table(report))


def _rank(rank: int, ranks: int, folder: str, nvme: str | None) -> None:
    """Train every cell in one process of the group; rank 0 writes the deviations."""
    sides.start(rank, ranks, folder)
    cells: list[dict[str, Any]] = []
    layouts = [*CELLS, *([(3, "nvme")] if nvme else [])]
    for clipping in (0.0, CLIPPED):
        expected = {NATIVE: alone(native_step, clipping), OURS: alone(our_step, clipping)}
        for stage, offload in layouts:
            zero: dict[str, Any] = {} if offload == "none" else {"offload_optimizer": {"device": offload}}
            if offload == "nvme":
                zero = {"offload_optimizer": {"device": "nvme", "nvme_path": nvme, "buffer_count": 8}}
            for side in (NATIVE, OURS):
                cell: dict[str, Any] = {"side": side, "stage": stage, "offload": offload, "clipped": clipping > 0}
                try:
                    cell |= deviation(together(side, stage, zero, clipping, rank, ranks), expected[side])
                except (RuntimeError, ValueError, AssertionError, AttributeError) as error:  # on all ranks alike
                    cell["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                cells.append(cell)
                if rank == 0:
                    print(cell, file=sys.stderr, flush=True)
    if rank == 0:
        with open(os.path.join(folder, "cells.json"), "w") as file:
            json.dump(cells, file)
    dist.barrier()
    dist.destroy_process_group()


def network() -> sides.Mlp:
    """Return a model with matrices whose shapes the ranks do not divide evenly."""
    torch.manual_seed(0)
    return sides.Mlp(48, [130, 75, 256])


def together(side: str, stage: int, zero: dict[str, Any], clipping: float, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the weights after training on all ranks, which share each batch."""
    engine = sides.engine(side, network(), stage, zero, clipping, BATCH // ranks)
    try:
        for step in range(UPDATES):
            engine.backward(LOSS * engine(sides.tokens(step, BATCH, LENGTH).chunk(ranks)[rank]))
            engine.step()
        return sides.whole_weights(engine)
    finally:
        engine.destroy()


def alone(make_step: Callable[[nn.Module], Callable[[], Any]], clipping: float) -> dict[str, Tensor]:
    """Return the weights after training in one process."""
    model = network()
    step_with = make_step(model)
    for step in range(UPDATES):
        model.zero_grad()
        (LOSS * model(sides.tokens(step, BATCH, LENGTH))).backward()
        if clipping:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clipping)
            assert norm > 2 * clipping, f"gradients of norm {norm:.3f} are hardly clipped"
        step_with()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def our_step(model: nn.Module) -> Callable[[], Any]:
    """Return the step of this package's optimizer."""
    options = {"lr": sides.LR, "weight_decay": sides.DECAY, "adamw_betas": sides.BETAS, "adamw_eps": sides.EPS}
    options |= {"ns_dtype": "fp32", "ns_coefficients": "original", "momentum": sides.MOMENTUM}
    return build_optimizer(model, options).step


def native_step(model: nn.Module) -> Callable[[], Any]:
    """Return a step by DeepSpeed's rule on whole matrices, with decoupled decay first as there, and torch's AdamW."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    matrices = [param for name, param in model.named_parameters() if sides.is_muon(name)]
    others = [param for name, param in model.named_parameters() if not sides.is_muon(name)]
    adamw = torch.optim.AdamW(others, lr=sides.LR, weight_decay=sides.DECAY, betas=sides.BETAS, eps=sides.EPS)
    buffers = [torch.zeros_like(param) for param in matrices]

    @torch.no_grad()
    def step() -> None:
        for param, buffer in zip(matrices, buffers, strict=True):
            assert param.grad is not None
            update = muon_update(param.grad, buffer, beta=sides.MOMENTUM, ns_method="gram")
            param.mul_(1 - sides.LR * sides.DECAY).add_(update, alpha=-sides.LR)
        adamw.step()

    return step


def deviation(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest distance of a parameter from its value in one process, relative to its movement there."""
    before = dict(network().named_parameters())
    apart = {
        name: ((weights[name] - weight).norm() / (weight - before[name].detach()).norm()).item()
        for name, weight in expected.items()
    }
    return {
        "matrices": max(value for name, value in apart.items() if sides.is_muon(name)),
        "others": max(value for name, value in apart.items() if not sides.is_muon(name)),
    }


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table of the deviation of Muon's matrices, with a row for each stage and offload."""
    by_key = {(c["side"], c["stage"], c["offload"], c["clipped"]): c for c in report["cells"]}
    layouts = list(dict.fromkeys((c["stage"], c["offload"]) for c in report["cells"]))
    lines = [
        f"| | {NATIVE}, not clipped | {NATIVE}, clipped | {OURS}, not clipped | {OURS}, clipped |",
        "| --- | --- | --- | --- | --- |",
    ]
    for stage, offload in layouts:
        cells = [by_key[side, stage, offload, clipped] for side in (NATIVE, OURS) for clipped in (False, True)]
        shown = [c["failed"] if "failed" in c else _short(c["matrices"]) for c in cells]
        where = "" if offload == "none" else f" + {offload}"
        lines.append(f"| ZeRO-{stage}{where} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.2f}" if value >= 0.01 else f"{value:.0e}"


if __name__ == "__main__":
    main()
