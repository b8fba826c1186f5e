"""`Muon` in `Accelerator.prepare`: attached to DeepSpeed, fed with shared sequences; and its sharded checkpoints."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
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
            raise RuntimeError(f"Accelerator.prepare was given {len(optimizers)} Muon optimizers; DeepSpeed takes one")
        from hf_muon.integrations.deepspeed.engine import attach, wrapping

        with wrapping(optimizers[0], self.deepspeed_plugin.deepspeed_config):
            ulysses.check_before_prepare(self, [arg for arg in args if hasattr(arg, "config")])
            result = prepare(self, *args, **kwargs)
            for one in result if isinstance(result, tuple) else (result,):
                if hasattr(one, "zero_optimization_stage"):  # DeepSpeed's engine
                    attach(one, optimizers[0])
        return result

    yield module.Accelerator, "prepare", prepare_and_attach


# What `load_fsdp_optimizer` is called with, by the names of its arguments.
_READ = ("fsdp_plugin", "optimizer", "input_dir")


def patch_sharded_loading(module: ModuleType) -> Iterator[Change]:
    """Patch `load_fsdp_optimizer` to convert sharded checkpoints, as far as a `Muon` converts whole states.

    Args:
        module: one that has imported the function: `accelerate.accelerator`, `transformers.trainer`.
    """
    load = module.load_fsdp_optimizer
    signature = inspect.signature(load)
    if missing := [name for name in _READ if name not in signature.parameters]:
        raise TypeError(f"load_fsdp_optimizer has no argument {', '.join(missing)}")

    @functools.wraps(load)
    def load_converted(*args: Any, **kwargs: Any) -> Any:
        muons = muons_in((*args, *kwargs.values()))
        call = signature.bind(*args, **kwargs).arguments if muons else {}
        if not call or _reads_whole_states(call):
            return load(*args, **kwargs)
        from hf_muon.optimizer.sharded_checkpoints import loading_from

        folder, name = Path(call["input_dir"]), f"optimizer_{call.get('optimizer_index', 0)}"
        with loading_from(muons[0], folder if folder.name == name else folder / name):
            return load(*args, **kwargs)

    yield module, "load_fsdp_optimizer", load_converted


def _reads_whole_states(call: dict[str, Any]) -> bool:
    """Return whether `load_fsdp_optimizer`, called with these arguments, reads no shards of FSDP2."""
    kind = call["fsdp_plugin"].state_dict_type
    return (kind is not None and kind.name == "FULL_STATE_DICT") or not call.get("use_dcp", True)
