"""Ranks of which one may die, hang or fail: forked for one run from a process that has imported everything."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.pool import Crash, ending, forking
from tests.equality.cells import Cell
from tests.equality.runs import digest, started, train

RANKS = 2


@dataclass(frozen=True)
class Fault:
    """`kind` (killed, stopped, out of memory, disk full) happens to `rank` in `phase` (step, save, load)."""

    kind: str
    phase: str
    rank: int

    def happen(self) -> None:
        if self.kind in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP)
        elif self.kind == "out of memory":
            torch.empty(2**60)  # torch's own error
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def inject(self) -> None:
        """Patch this process to fail in the exchange of a step, half-way through a file, or before moments load."""
        from hf_muon import Muon
        from hf_muon.distributed.exchange import Exchange

        if self.phase == "save":
            self._while_writing()
            return
        owner, name = (Exchange, "_complete") if self.phase == "step" else (Muon, "load_state_dict")
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (self.happen(), original(*args, **kwargs))[1])

    def _while_writing(self) -> None:
        """Fail when half of a checkpoint's bytes are on the disk; `torch.save` to a path calls no fsync."""
        fsync, save = os.fsync, torch.save

        def half(descriptor: int) -> None:
            os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
            fsync(descriptor)
            self.happen()

        def half_of_file(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            save(content, file, *args, **kwargs)
            if isinstance(file, str):
                os.truncate(file, os.stat(file).st_size // 2)
                self.happen()

        os.fsync, torch.save = half, half_of_file


def run(layout: str, fault: Fault | None = None, *, timeout: float = 120, **options: Any) -> list[Any]:
    """Train on two ranks; return for each the result of `trained`, the text of its error, or SIGKILL.

    Args:
        layout: of `tests.equality.layouts`.
        fault: the fault of one rank.
        timeout: timeout of the process group in seconds.
        options: of `trained`.

    Raises:
        Crash: a rank ended by a signal that no fault sends, as in torch's own code.
    """
    with tempfile.TemporaryDirectory(prefix="hf_muon_chaos") as folder:
        path = Path(folder)
        context = forking()
        ranks = [
            context.Process(target=_rank, args=(rank, path, timeout, layout, fault, options), daemon=True)
            for rank in range(RANKS)
        ]
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
                if -process.exitcode != signal.SIGKILL:
                    raise Crash(f"rank {rank} {ending(process.exitcode)}, which no fault sends")
                results.append("SIGKILL")
            else:
                results.append(torch.load(path / str(rank), weights_only=False))
        return results


def trained(
    rank: int, layout: str, first: int = 0, last: int = 0, load: str = "", save: str = "", form: str = "sharded"
) -> dict[str, str]:
    """Take steps from a checkpoint or from the start, and save; return digests of weights and moments."""
    with started(Cell(place=f"{layout}-{RANKS}", form=form, rule="scaled"), rank, "") as run_of_rank:
        if load:
            run_of_rank.load(load)
        train(run_of_rank, first, last)
        if save:
            run_of_rank.save(save)
        return digest(run_of_rank.tensors())


def _rank(rank: int, path: Path, timeout: float, layout: str, fault: Fault | None, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    save = torch.save  # before a fault is injected
    store = f"file://{path / 'store'}"
    try:
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
        if fault and fault.rank == rank:
            fault.inject()
        result: Any = trained(rank, layout, **options)
    except BaseException:  # noqa: BLE001  torch.distributed.checkpoint raises a BaseException on a full disk
        result = traceback.format_exc()
    save(result, path / str(rank))
    os._exit(0)  # end as a script that failed, without waiting for other ranks
