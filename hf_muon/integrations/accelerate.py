"""`Muon` in `Accelerator.prepare`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_muon.integrations.ulysses import hooks as ulysses

OURS = "_from_hf_muon"


def patch_accelerator(module: ModuleType) -> Callable[[], None] | None:
    """Have `Accelerator.prepare` attach a `Muon` that it hands to DeepSpeed, and data loaders cut into parts for it."""
    accelerator = module.Accelerator
    prepare = accelerator.prepare
    if getattr(prepare, OURS, False):
        return None

    @functools.wraps(prepare)
    def prepare_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = sys.modules.get("hf_muon.optimizer.muon")  # not imported: there is none
        given = [arg for arg in args if optimizer is not None and isinstance(arg, optimizer.Muon)]
        if not given or self.distributed_type.value != "DEEPSPEED":
            return prepare(self, *args, **kwargs)
        if len(given) > 1:
            raise RuntimeError(f"Accelerator.prepare was given {len(given)} Muon optimizers; DeepSpeed takes one")
        from hf_muon.integrations.deepspeed import engine as deepspeed

        ulysses.before_prepare(self, [arg for arg in args if hasattr(arg, "config")])
        with deepspeed.wrapping(given[0], self.deepspeed_plugin.deepspeed_config):
            result = prepare(self, *args, **kwargs)
            deepspeed.attach_one_of(result if isinstance(result, tuple) else (result,), given[0])
        return result

    setattr(prepare_and_attach, OURS, True)
    accelerator.prepare = prepare_and_attach
    undo_adapter = ulysses.patch_adapter(accelerator)

    def undo() -> None:
        accelerator.prepare = prepare
        if undo_adapter:
            undo_adapter()

    return undo
