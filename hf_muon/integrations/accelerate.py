"""`Muon` in `Accelerator.prepare`: attached to DeepSpeed, fed with shared sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change
from hf_muon.integrations.names import muons_in
from hf_muon.integrations.ulysses import hooks as ulysses


def patch_prepare(module: ModuleType) -> Iterator[Change]:
    """Patch `Accelerator.prepare` to attach a `Muon` to DeepSpeed's engine."""
    prepare = module.Accelerator.prepare

    @functools.wraps(prepare)
    def prepare_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizers = [muon for muon in muons_in(args) if any(muon is arg for arg in args)]  # not prepared yet
        if not optimizers or self.distributed_type.value != "DEEPSPEED":
            return prepare(self, *args, **kwargs)
        if len(optimizers) > 1:
            raise RuntimeError(
                f"Accelerator.prepare was given {len(optimizers)} Muon optimizers; DeepSpeed takes one [several-muons]"
            )
        from hf_muon.integrations.deepspeed.engine import attach, wrapping

        with wrapping(optimizers[0], self.deepspeed_plugin.deepspeed_config):
            ulysses.check_before_prepare(self, [arg for arg in args if hasattr(arg, "config")])
            result = prepare(self, *args, **kwargs)
            for item in result if isinstance(result, tuple) else (result,):
                if hasattr(item, "zero_optimization_stage"):  # DeepSpeed's engine
                    attach(item, optimizers[0])
        return result

    yield module.Accelerator, "prepare", prepare_and_attach
