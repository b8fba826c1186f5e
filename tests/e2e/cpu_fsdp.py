"""Open the real FSDP2 path of accelerate and Trainer on CPU and gloo; for tests alone.

accelerate uses an FSDP plugin on accelerators only: on a CPU it uses DDP without a warning. Everything after that one
decision (`fully_shard`, the swap of the optimizer's parameters, clipping, checkpoints) works on gloo.

As a script this module runs another: ``torchrun --nproc-per-node 2 tests/e2e/cpu_fsdp.py train.py arguments ...``
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState, is_initialized
from accelerate.utils import DistributedType


def open_fsdp() -> Callable[[], None]:
    """Let accelerate take FSDP plugins and tensor parallel sizes on CPU; return a function that undoes this."""
    initialize = AcceleratorState.__init__

    @functools.wraps(initialize)
    def initialize_with_fsdp(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        fresh = not is_initialized()
        initialize(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if fresh and plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            # The constructor does the same for the other MULTI_ types.
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            if hasattr(plugin.cpu_offload, "pin_memory"):
                plugin.cpu_offload = type(plugin.cpu_offload)(pin_memory=False)  # a CPU pins for an accelerator alone

    AcceleratorState.__init__ = initialize_with_fsdp
    close_sizes = _open_sizes()

    def close() -> None:
        AcceleratorState.__init__ = initialize
        close_sizes()

    return close


def _open_sizes() -> Callable[[], None]:
    """Let accelerate take `ParallelismConfig(tp_size=2)` on MULTI_CPU, which it does not count as several devices."""
    try:
        from accelerate import Accelerator, ParallelismConfig
    except ImportError:
        return lambda: None
    validate = ParallelismConfig._validate_accelerator

    @functools.wraps(validate)
    def validate_on_cpu(self: Any, accelerator: Accelerator) -> None:
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            return validate(self, accelerator)
        if self.total_size == 1:
            self._set_size("dp_replicate", accelerator.num_processes)
        assert self.total_size == accelerator.num_processes
        return None

    ParallelismConfig._validate_accelerator = validate_on_cpu

    def close() -> None:
        ParallelismConfig._validate_accelerator = validate

    return close


def forget_accelerator() -> None:
    """Let the next Trainer of this process choose its layout again; the process group and the environment stay."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def end() -> None:
    """End this process together with the other ranks: if one rank ends alone, the others abort.

    A thread of gloo waits for the interpreter to drop the tensors of the last collective. If the interpreter is
    finalized meanwhile, the thread aborts the process, so this process ends without finalizing it.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    open_fsdp()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
    end()
