"""`Muon` in `Accelerator.prepare`: attached to DeepSpeed, fed with shared sequences; and its sharded checkpoints."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_muon.integrations.names import is_ours, mark
from hf_muon.integrations.ulysses import hooks as ulysses


def patch_accelerator(module: ModuleType) -> Callable[[], None] | None:
    """Patch `Accelerator.prepare` to attach a `Muon` to DeepSpeed's engine; and its data loaders."""
    accelerator = module.Accelerator
    prepare = accelerator.prepare
    if is_ours(prepare):
        return None

    @functools.wraps(prepare)
    def prepare_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        room = sys.modules.get("hf_muon.optimizer.muon")  # never imported: then no argument is a Muon
        optimizers = [arg for arg in args if room is not None and isinstance(arg, room.Muon)]
        if not optimizers or self.distributed_type.value != "DEEPSPEED":
            return prepare(self, *args, **kwargs)
        if len(optimizers) > 1:
            raise RuntimeError(f"Accelerator.prepare was given {len(optimizers)} Muon optimizers; DeepSpeed takes one")
        from hf_muon.integrations.deepspeed import engine as deepspeed

        with deepspeed.wrapping(optimizers[0], self.deepspeed_plugin.deepspeed_config):
            with ulysses.preparing(self, [arg for arg in args if hasattr(arg, "config")]):
                result = prepare(self, *args, **kwargs)
            deepspeed.attach_one_of(result if isinstance(result, tuple) else (result,), optimizers[0])
        return result

    accelerator.prepare = mark(prepare_and_attach)
    undo_adapter = ulysses.patch_adapter(accelerator)
    undo_loading = patch_sharded_loading(module)

    def undo() -> None:
        accelerator.prepare = prepare
        undo_loading()
        if undo_adapter:
            undo_adapter()

    return undo


def patch_sharded_loading(module: ModuleType) -> Callable[[], None]:
    """Patch `load_fsdp_optimizer` to convert sharded checkpoints, as far as a `Muon` converts whole states.

    Args:
        module: one that has imported the function: `accelerate.accelerator`, `transformers.trainer`.

    Returns:
        A function that undoes this; it does nothing where the module has no such function.
    """
    load = getattr(module, "load_fsdp_optimizer", None)
    if load is None or is_ours(load):
        return lambda: None
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_converted(*args: Any, **kwargs: Any) -> Any:
        with _loading_from_shards(signature.bind(*args, **kwargs).arguments):
            return load(*args, **kwargs)

    module.load_fsdp_optimizer = mark(load_converted)  # type: ignore[attr-defined]

    def undo() -> None:
        module.load_fsdp_optimizer = load  # type: ignore[attr-defined]

    return undo


def _loading_from_shards(arguments: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return what `load_fsdp_optimizer` loads in, called with these arguments: `loading_from` for shards of FSDP2."""
    room = sys.modules.get("hf_muon.optimizer.muon")  # never imported: then the optimizer is no Muon
    plugin, optimizer = arguments["fsdp_plugin"], arguments["optimizer"]
    optimizer = getattr(optimizer, "optimizer", optimizer)
    folder, name = Path(arguments["input_dir"]), f"optimizer_{arguments.get('optimizer_index', 0)}"
    folder = folder if folder.name == name else folder / name
    is_whole = plugin.state_dict_type is not None and plugin.state_dict_type.name == "FULL_STATE_DICT"
    if room is None or not isinstance(optimizer, room.Muon) or is_whole or not arguments.get("use_dcp", True):
        return contextlib.nullcontext()
    from hf_muon.optimizer.sharded_checkpoints import loading_from

    return loading_from(optimizer, folder)
