"""Ranks that may die, hang or fail: forked for one run from a process that has imported everything."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.chaos.faults import Fault
from tests.distributed.pool import forking
from tests.equality.cells import Cell
from tests.equality.runs import digest, started, train

RANKS = 2


def run(layout: str, fault: Fault | None = None, *, timeout: float = 120, **options: Any) -> list[Any]:
    """Train on two ranks; return for each the result of `trained`, the text of its error, or the signal that ended it.

    Args:
        layout: of `tests.equality.layouts`.
        fault: the fault of one rank.
        timeout: timeout of the process group in seconds.
        options: of `trained`.
    """
    context = forking()
    with tempfile.TemporaryDirectory(prefix="hf_muon_chaos") as folder:
        path = Path(folder)
        arguments = [(rank, path, timeout, layout, fault, options) for rank in range(RANKS)]
        ranks = [context.Process(target=_rank, args=each, daemon=True) for each in arguments]
        for process in ranks:
            process.start()
        # A stopped rank never ends; the others must.
        stopped = fault.rank if fault and fault.kind == "stopped" else None
        deadline = time.monotonic() + timeout + 60
        for rank, process in enumerate(ranks):
            if rank != stopped:
                process.join(max(deadline - time.monotonic(), 0))
        results = []
        for rank, process in enumerate(ranks):
            if process.is_alive():
                results.append("stopped" if rank == stopped else "it hangs")
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            elif process.exitcode < 0:
                results.append(signal.Signals(-process.exitcode).name)
            else:
                results.append(torch.load(path / str(rank), weights_only=False))
        return results


def trained(
    rank: int, layout: str, first: int = 0, last: int = 0, load: str = "", save: str = "", form: str = "sharded"
) -> dict[str, str]:
    """Take steps from a checkpoint or from the start, and save; return digests of weights and moments."""
    cell = Cell(place=f"{layout}-{RANKS}", form=form, rule="scaled")
    with started(cell, rank, "") as run_of_rank:
        if load:
            run_of_rank.load(load)
        train(run_of_rank, first, last)
        if save:
            run_of_rank.save(save)
        return digest(run_of_rank.tensors())


def write(result: Any, path: Path) -> None:
    """Write a file completely or not at all."""
    part = path.with_suffix(".part")
    torch.save(result, part)
    part.rename(path)


def _rank(rank: int, path: Path, timeout: float, layout: str, fault: Fault | None, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = f"file://{path / 'store'}"
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
        if fault and fault.rank == rank:
            fault.inject()
        result: Any = trained(rank, layout, **options)
    except BaseException:  # noqa: BLE001  torch.distributed.checkpoint raises a BaseException on a full disk
        result = traceback.format_exc()
    write(result, path / str(rank))
    os._exit(0)  # end as a script that failed, without waiting for other ranks
