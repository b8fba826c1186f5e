"""`Muon` in `Accelerator.prepare`: its work shared by DDP's ranks, attached to DeepSpeed, fed with shared sequences."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_muon.integrations.names import is_ours, mark
from hf_muon.integrations.ulysses import hooks as ulysses

# Models that accelerate has wrapped in DDP: it keeps the ones inside of them.
_WRAPPED: weakref.WeakSet[Any] = weakref.WeakSet()


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
                share_work(self, result)
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


def share_work(accelerator: Any, result: Any) -> None:
    """Let DDP's ranks share the work of each prepared `Muon` all of whose parameters one prepared model replicates.

    An optimizer that was built before its model was wrapped does not know of DDP. One that has a `replicate_group`
    keeps it.

    Args:
        accelerator: that has prepared the model and the optimizer, together or one after the other.
        result: what `prepare` returns now.
    """
    from torch import nn

    for model in result if isinstance(result, tuple) else (result,):
        for module in model.modules() if isinstance(model, nn.Module) else ():
            if isinstance(module, nn.parallel.DistributedDataParallel) and not module.parameters_to_ignore:
                _WRAPPED.add(module)
    room = sys.modules.get("hf_muon.optimizer.muon")
    if room is None:
        return
    for wrapper in accelerator._optimizers:
        optimizer = getattr(wrapper, "optimizer", wrapper)
        if not isinstance(optimizer, room.Muon) or optimizer.replicate_group is not None:
            continue
        own = {param for group in optimizer.param_groups for param in group["params"]}
        for model in list(_WRAPPED):
            if own <= set(model.parameters()):
                _share_while_synchronized(optimizer, model)
                break


def _share_while_synchronized(optimizer: Any, model: Any) -> None:
    """Share the work of steps whose gradients DDP has reduced; in `no_sync`, as in LocalSGD, each rank has its own."""
    group, of = model.process_group, weakref.ref(model)
    optimizer.replicate_group = group

    def follow(optimizer: Any, args: Any, kwargs: Any) -> None:
        model = of()
        optimizer.replicate_group = None if model is not None and not model.require_backward_grad_sync else group

    optimizer.register_step_pre_hook(follow)
