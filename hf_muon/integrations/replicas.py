"""DDP's ranks share the work of a `Muon` that a framework has set up, in the steps whose gradients DDP has reduced."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

# Models that frameworks have wrapped in DDP: they hold the ones inside of them.
_WRAPPED: weakref.WeakSet[Any] = weakref.WeakSet()


def add_wrapped(models: Iterable[Any]) -> None:
    """Remember the DDP wrappers in `models` whose parameters are replicated, all of them, on one device."""
    from torch import nn

    for model in models:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel)
            if is_wrapper and not module.parameters_to_ignore and not module.is_multi_device_module:
                _WRAPPED.add(module)


def share_work(optimizers: Iterable[Any]) -> None:
    """Let DDP's ranks share the work of each `Muon` all of whose parameters one remembered model replicates.

    An optimizer that was built without its wrapper does not know of DDP. One that has a `replicate_group` keeps it.
    """
    room = sys.modules.get("hf_muon.optimizer.muon")  # never imported: then no optimizer is a Muon
    for optimizer in optimizers:
        if room is None or not isinstance(optimizer, room.Muon) or optimizer.replicate_group is not None:
            continue
        own = {param for group in optimizer.param_groups for param in group["params"]}
        for model in list(_WRAPPED):
            if own <= set(model.parameters()):
                _share_reduced_steps(optimizer, model)
                break


def _share_reduced_steps(optimizer: Any, model: Any) -> None:
    """Share steps whose gradients DDP has reduced. A closure computes them inside of the step, so it is asked after."""
    group, of = model.process_group, weakref.ref(model)
    optimizer.replicate_group = group

    def follow(optimizer: Any) -> None:
        model = of()
        optimizer.replicate_group = group if model is not None and has_reduced(model) else None

    def before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs["closure"] if "closure" in kwargs else args[1] if len(args) > 1 else None
        if closure is None:
            follow(optimizer)
            return None
        return args[:1], {**kwargs, "closure": _followed(closure, lambda: follow(optimizer))}

    optimizer.register_step_pre_hook(before_step)


def _followed(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    def call() -> Any:
        loss = closure()
        then()
        return loss

    return call


def has_reduced(model: Any) -> bool:
    """Return whether DDP has reduced the gradients of its last forward pass over all of its ranks.

    It has not in `no_sync` (LocalSGD) and perhaps not with a communication hook (post-localSGD reduces over a node). In
    `join` ranks that have no batch left take no step, so that the others must not wait for them.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    over_all = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    return (
        model.require_backward_grad_sync
        and model.require_forward_param_sync  # of the last forward pass, where the other one is of this moment
        and all(hook in over_all for hook, _ in model._comm_hooks)
        and not model._join_config.enable
    )
