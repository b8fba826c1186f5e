"""What a step sends and multiplies, counted where torch dispatches it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

_COPIES = ("_allgather_base_", "broadcast_")


class Counted(TorchDispatchMode):
    """Counts a step's bytes to other ranks, its collectives and its FLOPs in products of matrices.

    Attributes:
        bytes: sent to other ranks, without those with which an all-gather pads; reports of ranks are not counted.
        calls: collectives that carry them.
        words: all-gathers of integers, by which ranks agree before they step.
        flops: multiplications and additions.
    """

    def __enter__(self) -> Counted:
        self.bytes = self.calls = self.words = 0
        self._copied = (0, 0)  # where the last copy went, and its bytes
        self._products = FlopCounterMode(display=False)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._products)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @property
    def flops(self) -> int:
        return self._products.get_total_flops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, name = func._schema.name.partition("::")
        if kind == "c10d":
            self._note(name, args)
        elif name == "copy_":
            self._copied = args[0].data_ptr(), args[0].nbytes
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        if name == "alltoall_base_":
            _, sent, group, _, sizes, *_ = args
            group = dist.ProcessGroup.unbox(group)
            rank = group.rank()
            sizes = sizes or [len(sent) // group.size()] * group.size()
            self.bytes += (sum(sizes) - sizes[rank]) * sent.element_size()
            self.calls += 1
        elif name in _COPIES:
            own, group = (args[0][0], args[1]) if name == "broadcast_" else (args[1], args[2])
            group = dist.ProcessGroup.unbox(group)
            if isinstance(own, torch.Tensor) and not own.is_floating_point():
                self.words += 1
                return
            if name != "broadcast_" or group.rank() == args[2]:
                where, nbytes = self._copied  # into the memory that is sent, if it was padded
                padded = name != "broadcast_" and where == own.data_ptr() and nbytes < own.nbytes
                self.bytes += (nbytes if padded else own.nbytes) * (group.size() - 1)
            self.calls += 1
