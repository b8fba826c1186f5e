"""Rehearse optimizer steps without an accelerator: what each asks of one, in the table ``rehearsal.csv``.

    python -m benchmarks.rehearsal                    # compare with the table
    python -m benchmarks.rehearsal --write            # write it
    python -m benchmarks.rehearsal --only FSDP2 int8  # rows whose names have these texts
    python -m benchmarks.rehearsal --host             # the host's time, which the table does not have
    python -m benchmarks.rehearsal --dion CHECKOUT    # microsoft/dion, counted in the same way

Nothing is measured but the host's time, and nothing is sent: see `benchmarks.count` and `benchmarks.fake_layouts`. A
test asserts the table, so that a change that costs launches shows as a difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.accelerator import META, as_accelerator
from benchmarks.count import counting
from benchmarks.fake_layouts import DTYPES, mesh_of, meta_model, rank_of, shard_, zero_step
from benchmarks.live_bytes import LiveBytes
from benchmarks.rehearsal_table import (
    CASES,
    LORA,
    README,
    TABLE,
    Case,
    Figures,
    differences,
    read_table,
    readme_lines,
    readme_with,
    write_table,
)
from hf_muon import build_optimizer
from hf_muon.diagnostics import log
from hf_muon.storage.tensors import local_of

MOST_RANKS = 4  # counted of each case, evenly spaced


def options_of(case: Case) -> dict[str, Any]:
    """Return the options of `build_optimizer`."""
    return {
        "lr": 1e-3,
        "ns_dtype": case.ns_dtype,
        "momentum_dtype": case.momentum,
        "adamw_state_dtype": case.adamw,
        **({"comm_dtype": "bf16"} if case.ranks > 1 else {}),
        **({"lora": "muon"} if case.model == LORA else {}),
        **({"momentum_offload": "cpu"} if case.offload == "momentum_offload=cpu" else {}),
    }


def step_of(case: Case, model: nn.Module) -> Callable[[], Any]:
    """Return the step of a case on this rank, whose parameters the model has from now on."""
    device = torch.device("cpu") if case.offload in ("CPUOffloadPolicy", "offload_optimizer") else META
    if case.layout.startswith("ZeRO"):
        return zero_step(model, options_of(case), 3 if case.layout == "ZeRO-3" else 2, device)
    if case.layout not in ("one process", "DDP"):
        shard_(model, case.layout, mesh_of(case.layout, case.ranks), device)
    group = dist.group.WORLD if case.layout == "DDP" else None
    return build_optimizer(model, options_of(case), replicate_group=group).step  # type: ignore[no-any-return]


Make = Callable[[Case, nn.Module], Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class RankFigures:
    """The figures of one rank: numbers, not means; `stored` are the weights of which it has a part."""

    launches: int
    products: int
    collectives: int
    waits: int
    traffic: int
    host: int
    peak: int
    stored: float
    names: dict[str, int]


def rehearse_rank(case: Case, rank: int, make: Make = step_of) -> RankFigures:
    """Return what the second step of a rank asks of its device."""
    with rank_of(case.ranks, rank), as_accelerator():
        model = meta_model(case.model, DTYPES[case.weights])
        total = sum(param.numel() for param in model.parameters() if param.requires_grad)
        step = make(case, model)
        with counting():  # the device answers
            step()
        with LiveBytes("meta") as live, counting() as count, as_accelerator(count):
            step()
        local = sum(local_of(param).numel() for param in model.parameters() if param.requires_grad)
    return RankFigures(
        count.launches.total(),
        count.products,
        count.collectives,
        count.waits.total(),
        count.traffic.total(),
        count.host_bytes,
        live.peak,
        total / case.ranks if case.layout.startswith("ZeRO") else local,
        dict(count.launches) | {f"wait: {name}": number for name, number in count.waits.items()},
    )


def ranks_of(case: Case) -> range:
    """Return the ranks that are counted."""
    return range(0, case.ranks, max(1, case.ranks // MOST_RANKS))


def rehearse(case: Case, make: Make = step_of) -> Figures:
    """Return the figures of a case."""
    ranks = [rehearse_rank(case, rank, make) for rank in ranks_of(case)]
    stored = sum(rank.stored for rank in ranks)
    return Figures(
        launches=round(fmean(rank.launches for rank in ranks), 1),
        most=max(rank.launches for rank in ranks),
        products=round(fmean(rank.products for rank in ranks), 1),
        collectives=max(rank.collectives for rank in ranks),
        waits=max(rank.waits for rank in ranks),
        traffic=round(sum(rank.traffic for rank in ranks) / stored, 1),
        host=round(sum(rank.host for rank in ranks) / stored, 1),
        peak=round(max(rank.peak for rank in ranks) / 1e6, 1),
    )


def host_ms(case: Case, make: Make = step_of) -> float:
    """Measure the processor time of the host in a step, in milliseconds, the median of ranks; without reads."""
    seconds = []
    for rank in ranks_of(case):
        with rank_of(case.ranks, rank, reads=False), as_accelerator(reads=False):
            step = make(case, meta_model(case.model, DTYPES[case.weights]))
            step()
            step()
            begin = time.process_time()
            step()
            seconds.append(time.process_time() - begin)
    return 1e3 * median(seconds)


# --- microsoft/dion


def dions(checkout: str) -> Make:
    """Return what makes the step of microsoft/dion's Muon."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled; see benchmarks/README.md
    sys.path.insert(0, checkout)
    muon = importlib.import_module("dion.muon").Muon
    # The fused kernel does not run on meta tensors: one call of another operator stands for it.
    torch._fused_adamw_ = lambda params, *_, **__: params[0].copy_(params[0])  # type: ignore[assignment]

    def make(case: Case, model: nn.Module) -> Callable[[], Any]:
        mesh = None
        if case.layout != "DDP" and case.ranks > 1:
            mesh = mesh_of(case.layout, case.ranks)
            shard_(model, case.layout, mesh, META)
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        matrices = [param for name, param in named.items() if param.ndim == 2 and "embed" not in name]
        others = [param for name, param in named.items() if param.ndim != 2 or "embed" in name]
        groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
        where = None if case.ranks == 1 else dist.group.WORLD if mesh is None else mesh
        return muon(groups, distributed_mesh=where, lr=1e-3).step  # type: ignore[no-any-return]

    return make


def of_dion(case: Case) -> bool:
    """Return whether dion has the layout: not ZeRO, offload and other dtypes of moments; and HSDP needs real groups."""
    return case.layout in ("one process", "DDP", "FSDP2") and case == Case(layout=case.layout, ranks=case.ranks)


def main() -> None:
    """Print the figures beside the table's, or write them."""
    log.logger().setLevel("ERROR")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help="write rehearsal.csv, and its tables in README.md")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose names have all of these")
    parser.add_argument("--host", action="store_true", help="measure the host's time, too")
    parser.add_argument("--names", action="store_true", help="print what rank 0 launches and waits for, by name")
    parser.add_argument("--dion", metavar="CHECKOUT", help="a checkout of github.com/microsoft/dion to count instead")
    arguments = parser.parse_args()
    make = dions(arguments.dion) if arguments.dion else step_of
    table = read_table() if TABLE.exists() else {}
    for case in CASES:
        if not all(text in str(case) for text in arguments.only) or (arguments.dion and not of_dion(case)):
            continue
        figures = rehearse(case, make)
        host = f", host {host_ms(case, make):.0f} ms" if arguments.host and not case.offload else ""
        print(f"{case}: {', '.join(f'{k} {v:g}' for k, v in dataclasses.asdict(figures).items())}{host}", flush=True)
        if arguments.names:
            print("  " + ", ".join(f"{k} {v}" for k, v in rehearse_rank(case, 0, make).names.items()))
        if not arguments.dion:
            for line in differences(case, figures, table.get(case)):
                print(f"  {line}")
            table[case] = figures
    if arguments.write:
        write_table(table)
        README.write_text(readme_with(README.read_text(), readme_lines(read_table())))


if __name__ == "__main__":
    main()
