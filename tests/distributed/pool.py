"""Pools of worker processes, which start Python and torch once for many cases on several ranks."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# With modules that a first step imports, which would take half a second in every rank.
PRELOADED = (
    *("fsspec", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"),
    *("hf_muon", "hf_muon.distributed.exchange", "hf_muon.storage.dtensor"),
    "tests.distributed.training",
)


GRACE = 8.0
"""Seconds that other ranks have when one has failed, to say why they wait."""


class Crash(BaseException):
    """A process of a rank has died. It is no `Exception`, which hypothesis would try again and then call flaky."""


def forking(modules: Sequence[str] = PRELOADED) -> Any:
    """Return a context that forks processes in 0.1 s each, from a server that has imported these modules.

    A process has one such server, with the modules of the first call.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*modules, "tests.distributed.freeze"])
    return context


class Pool:
    """Ranks of one gloo group that run functions by name.

    Args:
        world_size: number of ranks.
        timeout: seconds that a case may take; a collective that hangs for half of them raises an error.
        backend: backend of torch.distributed.
        forks: start the ranks as `forking` does. Functions that need a fresh process, as with CUDA, need False.
        modules: modules that the ranks need, of `forking`.
    """

    def __init__(
        self,
        world_size: int,
        timeout: float = 400,
        backend: str = "gloo",
        *,
        forks: bool = False,
        modules: Sequence[str] = PRELOADED,
    ) -> None:
        self.world_size = world_size
        self.forks = forks
        self.modules = modules
        self.backend = backend
        self.timeout = timeout
        self._workers: list[tuple[Any, Any]] = []
        self._last = ""

    def run(self, function: Any, **kwargs: Any) -> list[Any]:
        """Return the results of `function(rank, **kwargs)` on all ranks.

        Raises:
            AssertionError: a rank failed; the message has the traceback of each such rank.
            Crash: a rank died; the message has the signal or exit code, and the tracebacks of the others.
        """
        if not self._workers:
            self._start()
        self._last = f"{function.__module__}.{function.__qualname__}"
        for _, pipe in self._workers:
            pipe.send((function.__module__, function.__qualname__, kwargs))
        answers: dict[int, tuple[bool, Any]] = {}
        failure: type[BaseException] = AssertionError
        deadline = time.monotonic() + self.timeout
        while len(answers) < self.world_size and (seconds := deadline - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers) if rank not in answers}
            for pipe in connection.wait(list(waiting), seconds):
                rank = waiting[pipe]
                try:
                    answers[rank] = self._answer(rank)
                except Crash as crash:
                    failure, answers[rank] = Crash, (False, str(crash))
                if not answers[rank][0]:  # the others may wait for this rank
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in set(range(self.world_size)) - answers.keys():
            answers[rank] = (False, f"no answer in {self.timeout} s, or in {GRACE} s after another rank failed")
        failures = [f"rank {rank}: {answer}" for rank, (fine, answer) in sorted(answers.items()) if not fine]
        if failures:
            self.close(kill=True)  # the ranks no longer agree on which collective is next
            raise failure("\n".join(failures))
        return [answers[rank][1] for rank in range(self.world_size)]

    def _start(self) -> None:
        context = forking(self.modules) if self.forks else mp.get_context("spawn")
        path = tempfile.mkdtemp(prefix="hf_muon_pool")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, self.backend, os.path.join(path, "store"), self.timeout, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _answer(self, rank: int) -> tuple[bool, Any]:
        process, pipe = self._workers[rank]
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process.join(5)
            raise Crash(f"the process died: {ending(process.exitcode)}") from None

    def close(self, *, kill: bool = False) -> None:
        """End the workers.

        Raises:
            AssertionError: a rank that was not killed has another exit code than 0, or did not end in 20 seconds.
        """
        workers, self._workers = self._workers, []
        for process, pipe in workers:
            if kill:
                process.kill()
            else:
                with contextlib.suppress(OSError):  # a rank that died has an exit code
                    pipe.send(None)
        for process, _ in workers:
            process.join(20)
        codes = [process.exitcode for process, _ in workers]
        for process, _ in workers:
            if process.exitcode is None:
                process.kill()
        if not kill and any(code != 0 for code in codes):
            endings = [f"rank {rank} {ending(code)}" for rank, code in enumerate(codes) if code != 0]
            raise AssertionError(f"{'; '.join(endings)}. The last that its pool ran was {self._last}")


def ending(code: int | None) -> str:
    """Return in words how a process has ended, by its exit code."""
    if code is None:
        return "did not end in time"
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _serve(rank: int, world_size: int, backend: str, store: str, timeout: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout / 2),
    )
    while (order := pipe.recv()) is not None:
        # DeepSpeed runs the garbage collector for every engine. Freezing old objects leaves it only the new ones; in a
        # forked process those of its parent are frozen already.
        gc.collect()
        gc.freeze()
        module, name, kwargs = order
        try:
            torch.manual_seed(0)
            pipe.send((True, getattr(importlib.import_module(module), name)(rank, **kwargs)))
        except BaseException:  # noqa: BLE001  the test fails with it
            pipe.send((False, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()
