"""Faults of one rank: their kinds, and the phases of a run in which they happen."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("killed", "stopped", "out of memory", "disk full")
PHASES = ("step", "save", "load")


@dataclass(frozen=True)
class Fault:
    """`kind`, one of KINDS, happens to `rank` in `phase`, one of PHASES."""

    kind: str
    phase: str
    rank: int

    def happen(self) -> None:
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "out of memory":
            torch.empty(2**60)  # torch's own error
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def inject(self) -> None:
        """Patch this process to fail in the exchange of a step, half-way through a file, or before moments load."""
        from hf_muon import Muon
        from hf_muon.distributed.exchange import Exchange

        if self.phase == "step":
            self._before(Exchange, "_complete")
        elif self.phase == "load":
            self._before(Muon, "load_state_dict")
        else:
            self._while_writing()

    def _before(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            self.happen()
            return original(*args, **kwargs)

        setattr(owner, name, patched)

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
