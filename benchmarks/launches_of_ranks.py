"""Count the launches and host time of a step on each rank of a fake process group: ``launches_of_ranks.json``.

    python -m benchmarks.launches_of_ranks                          # compare with the table
    python -m benchmarks.launches_of_ranks --write                  # write it
    python -m benchmarks.launches_of_ranks --dion PATH_TO_CHECKOUT  # microsoft/dion, counted in the same way

Nothing is measured but host time, and nothing is sent: see `benchmarks.count`. Ranks differ in what they own, so some
of them are counted, each in a process group of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.count import counting
from benchmarks.launches import MODELS, counted_reads, meta_model
from hf_muon import build_optimizer
from hf_muon.diagnostics import log
from hf_muon.distributed import agreement
from hf_muon.optimizer import layout as layouts

TABLE = Path(__file__).with_name("launches_of_ranks.json")
MODEL = "Qwen3-0.6B"
CASES = [("ddp", 2), ("ddp", 8), ("fsdp", 2), ("fsdp", 8), ("hsdp", 8), ("fsdp", 64)]
MOST_RANKS = 8  # counted of each case, evenly spaced
_COLLECTIVES = ("alltoall_base", "_allgather_base", "allgather", "alltoall", "reduce_scatter", "allreduce")


@contextlib.contextmanager
def rank_of(ranks: int, rank: int) -> Iterator[None]:
    """Be a rank of a fake process group, whose other ranks report what this one does."""

    def reports(self: agreement.PendingReports) -> list[agreement.RankReport]:
        with contextlib.suppress(NotImplementedError):  # where reads are not counted
            self.read.tolist()
        return [agreement.RankReport(0, 0, complains=False, flags=(0, 1))] * ranks

    def report_device(group: dist.ProcessGroup, model_device: torch.device) -> torch.device:
        return model_device

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            mock.patch.object(agreement.PendingReports, "reports", reports),
            mock.patch.object(agreement, "report_device", report_device),
            mock.patch.object(layouts, "model_device", return_value=torch.device("meta")),
        ):
            yield
    finally:
        dist.destroy_process_group()


def mesh_of(layout: str, ranks: int) -> tuple[DeviceMesh, list[Placement]]:
    """Return a mesh and placements: FSDP2 over all ranks, or HSDP with two replicas."""
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, ranks // 2)), [Replicate(), Shard(0)]
    return init_device_mesh("cpu", (ranks,)), [Shard(0)]


def shard_(model: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """Replace parameters on the meta device by DTensors that are cut along their first dim, with gradients."""
    shards, place = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    known: dict[int, nn.Parameter] = {}

    def of(param: Tensor) -> DTensor:
        local = param.detach().chunk(shards)[place : place + 1]
        local = local[0] if local else param.detach()[:0]
        return DTensor.from_local(
            local.clone(), mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
        )

    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in known:
                    known[id(param)] = nn.Parameter(of(param))
                    known[id(param)].grad = of(param)
                module._parameters[name] = known[id(param)]


def ours(model: nn.Module, layout: str) -> Callable[[], Any]:
    """Return hf_muon's step."""
    group = dist.group.WORLD if layout == "ddp" else None
    return build_optimizer(model, {"lr": 1e-3, "ns_dtype": "bf16", "comm_dtype": "bf16"}, replicate_group=group).step


def dions(checkout: str, mesh: DeviceMesh | None) -> Callable[[nn.Module, str], Callable[[], Any]]:
    """Return what makes the step of microsoft/dion's Muon."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled; see benchmarks/README.md
    sys.path.insert(0, checkout)
    muon = importlib.import_module("dion.muon").Muon
    # The fused kernel does not run on meta tensors: one call of another operator stands for it.
    torch._fused_adamw_ = lambda params, *_, **__: params[0].copy_(params[0])  # type: ignore[assignment]

    def make(model: nn.Module, layout: str) -> Callable[[], Any]:
        named = dict(model.named_parameters())
        matrices = [param for name, param in named.items() if param.ndim == 2 and "embed" not in name]
        others = [param for name, param in named.items() if param.ndim != 2 or "embed" in name]
        groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
        where = dist.group.WORLD if mesh is None else mesh
        return muon(groups, distributed_mesh=where, lr=1e-3).step

    return make


def count_rank(layout: str, ranks: int, rank: int, checkout: str | None = None) -> tuple[int, int, float]:
    """Return the launches and collectives of the second step of one rank, and its host's processor time in seconds."""
    with rank_of(ranks, rank):
        model = meta_model(MODELS[MODEL](), torch.bfloat16)
        mesh = None
        if layout != "ddp":
            mesh, placements = mesh_of(layout, ranks)
            shard_(model, mesh, placements)
        step = (dions(checkout, mesh) if checkout else ours)(model, layout)
        step()
        with counted_reads():
            begin = time.process_time()
            step()
            seconds = time.process_time() - begin
            with counting() as count:
                step()
    collectives = sum(count.launches[name] for name in _COLLECTIVES)
    return sum(count.launches.values()), collectives, seconds


def count_case(layout: str, ranks: int, checkout: str | None = None) -> tuple[dict[str, float], float]:
    """Return the mean and the most launches of some ranks and their collectives; and the median of host seconds."""
    of_ranks = [count_rank(layout, ranks, rank, checkout) for rank in range(0, ranks, max(1, ranks // MOST_RANKS))]
    launches, collectives, seconds = zip(*of_ranks, strict=True)
    case = {"launches, mean": round(fmean(launches), 1), "most": max(launches), "collectives": max(collectives)}
    return case, median(seconds)


def main() -> None:
    """Print the counts beside the table's, or write them."""
    log.logger().setLevel("ERROR")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help="write launches_of_ranks.json")
    parser.add_argument("--dion", help="a checkout of github.com/microsoft/dion to count instead")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not (arguments.dion and case[0] == "hsdp")]  # where it needs real groups
    counts = {}
    for layout, ranks in cases:
        case, seconds = count_case(layout, ranks, arguments.dion)
        counts[f"{MODEL}, {layout} on {ranks}"] = case
        print(f"{layout} on {ranks}: {case}, host {seconds:.3f} s", flush=True)
    if arguments.write:
        TABLE.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
