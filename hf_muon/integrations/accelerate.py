"""`Muon` in `Accelerator.prepare`: its work shared by DDP's ranks, attached to DeepSpeed, fed with shared sequences."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_muon.integrations.names import is_ours, mark
from hf_muon.integrations.replicas import add_wrapped, share_work
from hf_muon.integrations.ulysses import hooks as ulysses


def patch_accelerator(module: ModuleType) -> Callable[[], None] | None:
    """Patch `Accelerator.prepare` to attach a `Muon` to DDP's ranks or DeepSpeed's engine; and its data loaders."""
    accelerator = module.Accelerator
    prepare = accelerator.prepare
    if is_ours(prepare):
        return None

    @functools.wraps(prepare)
    def prepare_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        room = sys.modules.get("hf_muon.optimizer.muon")  # never imported: then no argument is a Muon
        optimizers = [arg for arg in args if room is not None and isinstance(arg, room.Muon)]
        if not optimizers or self.distributed_type.value != "DEEPSPEED":
            result = prepare(self, *args, **kwargs)
            if self.distributed_type.value.startswith("MULTI_"):
                # Model and optimizer are prepared together, or one after the other.
                add_wrapped(result if isinstance(result, tuple) else (result,))
                share_work(getattr(wrapper, "optimizer", wrapper) for wrapper in self._optimizers)
            return result
        if len(optimizers) > 1:
            raise RuntimeError(f"Accelerator.prepare was given {len(optimizers)} Muon optimizers; DeepSpeed takes one")
        from hf_muon.integrations.deepspeed import engine as deepspeed

        ulysses.before_prepare(self, [arg for arg in args if hasattr(arg, "config")])
        with deepspeed.wrapping(optimizers[0], self.deepspeed_plugin.deepspeed_config):
            result = prepare(self, *args, **kwargs)
            deepspeed.attach_one_of(result if isinstance(result, tuple) else (result,), optimizers[0])
        return result

    accelerator.prepare = mark(prepare_and_attach)
    undo_adapter = ulysses.patch_adapter(accelerator)

    def undo() -> None:
        accelerator.prepare = prepare
        if undo_adapter:
            undo_adapter()

    return undo
