"""Ranks that die or stop at any call, and the errors of the others."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

from tests.distributed.pool import Pool

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Mortal(Pool):
    """Forked ranks of which one does not answer."""

    def __init__(self, world_size: int, timeout: float, modules: Sequence[str]) -> None:
        super().__init__(world_size, timeout, forks=True, modules=modules)

    def survivors(self, function: Any, victim: int, **kwargs: Any) -> list[str | None]:
        """Return the errors of `function(rank, victim=victim, **kwargs)` on all ranks but the victim; None for success.

        Raises:
            AssertionError: a rank did not end in time.
            Crash: a rank but the victim died.
        """
        self._start()
        for _, pipe in self._workers:
            pipe.send((function.__module__, function.__qualname__, {"victim": victim, **kwargs}))
        errors: list[str | None] = []
        try:
            for rank, (_, pipe) in enumerate(self._workers):
                if rank != victim:
                    assert pipe.poll(self.timeout), f"rank {rank} did not end in {self.timeout} s"
                    fine, answer = self._answer(rank)
                    errors.append(None if fine else answer)
        finally:
            self.close(kill=True)
        return errors


@contextlib.contextmanager
def dying(at: int | None = None, how: str = "killed") -> Iterator[SimpleNamespace]:
    """Count the Python calls inside the context, and kill or stop this process at one of them.

    Args:
        at: the number of the call at which to die; None to survive.
        how: one of SIGNALS.
    """
    counter = SimpleNamespace(calls=0)

    def count(frame: FrameType, event: str, argument: Any) -> None:
        counter.calls += event == "call"
        if counter.calls == at:
            os.kill(os.getpid(), SIGNALS[how])

    sys.setprofile(count)
    try:
        yield counter
    finally:
        sys.setprofile(None)
