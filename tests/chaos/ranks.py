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
from tests.distributed.training import train

RANKS = 2


def run(
    layout: str,
    fault: Fault | None = None,
    *,
    timeout: float = 120,
    later: dict[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """Train on two ranks; return for each the result of `train`, the text of its error, or the signal that ended it.

    Args:
        layout: a layout of `tests.distributed.training`.
        fault: the fault of one rank.
        timeout: timeout of the process group in seconds.
        later: options of a second run in the same processes. The fault happens in the second run, and `run` returns
            the results of the first, also for the rank that the fault ended.
    """
    context = forking()
    with tempfile.TemporaryDirectory(prefix="hf_muon_chaos") as folder:
        path = Path(folder)
        arguments = [(rank, path, timeout, layout, fault, options, later) for rank in range(RANKS)]
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
            elif process.exitcode < 0 and not later:
                results.append(signal.Signals(-process.exitcode).name)
            else:
                results.append(torch.load(path / str(rank), weights_only=False))
        if later and fault:
            assert ranks[fault.rank].exitcode == -signal.SIGKILL, "the fault did not kill the rank"
        return results


def write(result: Any, path: Path) -> None:
    """Write a file completely or not at all."""
    part = path.with_suffix(".part")
    torch.save(result, part)
    part.rename(path)


def _rank(
    rank: int,
    path: Path,
    timeout: float,
    layout: str,
    fault: Fault | None,
    options: dict[str, Any],
    later: dict[str, Any] | None,
) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = f"file://{path / 'store'}"
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
        if later:
            write(train(rank, layout, **options), path / str(rank))
        if fault and fault.rank == rank:
            fault.inject()
        result: Any = train(rank, layout, **(later or options))
    except BaseException:  # noqa: BLE001  torch.distributed.checkpoint raises a BaseException on a full disk
        result = traceback.format_exc()
    if not later:
        write(result, path / str(rank))
    os._exit(0)  # end as a script that failed, without waiting for other ranks
