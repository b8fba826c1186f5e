"""DistributedDataParallel: find the steps in which its ranks share the work of an optimizer.

Parameters have no reference to the wrapper around their model, and the wrapper may be made before or after the
optimizer. So each wrapper is recorded when it registers its model, and each step looks up the wrappers that hold its
parameters.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hf_muon.diagnostics import log
from hf_muon.distributed.groups import is_alive
from hf_muon.math.torch_private import (
    communication_hooks,
    current_pass,
    has_begun_static,
    is_joining,
    reduces_in_hooks,
)


class _Passes:
    """The last backward pass that has accumulated gradients of a wrapper's model, and whether DDP has reduced it.

    The reducer notes when each gradient of a pass was ready, if and only if it reduces the pass. Two ways to reduce are
    not noted: the first pass of a static graph, for which the wrapper has a flag, and the hooks of the Python reducer,
    which compiled autograd needs, and which reduce each gradient unless in `no_sync`.

    Args:
        wrapper: not kept alive.
        reduced: the answer before the first pass.
    """

    def __init__(self, wrapper: DistributedDataParallel, reduced: bool) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._reduced, self._is_asked, self._in_sync = reduced, True, True
        # Within its own `__init__` a wrapper has no reducer yet.
        self._has_begun = hasattr(wrapper, "reducer") and has_begun_static(wrapper)
        self._pass = -1
        self._times: list[int] = []

    def accumulated(self, _: Tensor) -> None:
        """Note the backward pass that has accumulated a gradient, before DDP has noted anything of it."""
        # A compiled pass is none of autograd's, and has no number.
        current = -1 if torch.compiler.is_compiling() else current_pass()
        wrapper = self._wrapper() if current < 0 or current != self._pass else None
        # Without a reducer, its `__init__` has failed.
        if wrapper is not None and hasattr(wrapper, "reducer"):
            self._pass, self._is_asked = current, False
            self._in_sync = wrapper.require_backward_grad_sync
            if current >= 0:
                self._times = wrapper.reducer.get_backward_stats()

    def have_reduced(self, wrapper: DistributedDataParallel) -> bool:
        """Return whether DDP has reduced the gradients of the last pass, or there was none yet."""
        if not self._is_asked:
            has_begun = has_begun_static(wrapper)
            if reduces_in_hooks(wrapper):
                self._reduced = self._in_sync
            else:
                begins = has_begun and not self._has_begun
                self._reduced = begins or wrapper.reducer.get_backward_stats() != self._times
            self._is_asked, self._has_begun = True, has_begun
        return self._reduced


_wrappers: weakref.WeakKeyDictionary[DistributedDataParallel, _Passes] = weakref.WeakKeyDictionary()
_registered = 0


def _note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Record a wrapper. Called whenever a module registers a submodule, as a wrapper does with its model."""
    global _registered
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        _registered += 1
        _record(module, submodule, True)


def _note_existing() -> None:
    """Record the wrappers that were made before this module was imported."""
    # Without a process group there are none.
    if dist.is_available() and dist.is_initialized():
        # isinstance would read the `__class__` of any object.
        for made in [made for made in gc.get_objects() if issubclass(type(made), DistributedDataParallel)]:
            if hasattr(made, "module"):
                _record(made, made.module, made.require_forward_param_sync and made.require_backward_grad_sync)


def _record(wrapper: DistributedDataParallel, model: nn.Module, reduced: bool) -> None:
    if wrapper in _wrappers:
        return
    passes = _wrappers[wrapper] = _Passes(wrapper, reduced)
    handles = [
        param.register_post_accumulate_grad_hook(passes.accumulated)  # type: ignore[no-untyped-call]
        for param in model.parameters()
        if param.requires_grad
    ]
    weakref.finalize(wrapper, lambda: [handle.remove() for handle in handles]).atexit = False


register_module_module_registration_hook(_note)
_note_existing()


PARTED = (
    "DDP has not reduced the gradients of this step over ranks that all take it (no_sync, join, or a communication "
    "hook): ranks have moments of their own, and from now on each of them orthogonalizes all matrices [ranks-part]"
)


class Replicas:
    """The wrappers that hold all parameters of an optimizer, whose ranks have the same parameters and moments.

    Ranks remain equal as long as the gradients of every step were reduced over all of them. After another step, as in
    `no_sync`, each rank has different moments, and steps without the others from then on.
    """

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._holding: list[weakref.ref[DistributedDataParallel]] = []
        self.have_parted = self._is_own = False
        """Whether ranks have different moments, so that each steps without the others."""

    def of_step(self, params: Sequence[Tensor]) -> DistributedDataParallel | None:
        """Return the wrapper whose ranks take this step together; None if each takes it without the others.

        Args:
            params: all parameters of an optimizer, after their gradients have been computed.
        """
        self._is_own = False
        if not _wrappers or self.have_parted:
            return None
        key = (_registered, *map(id, params))
        if key != self._key:
            stepped = set(params)
            # Without a reducer, the `__init__` of a wrapper has failed.
            complete = (ddp for ddp in list(_wrappers) if hasattr(ddp, "reducer"))
            self._holding = [weakref.ref(ddp) for ddp in complete if stepped <= set(_reduced_params(ddp))]
            self._key = key
        holding = [ddp for ref in self._holding if (ddp := ref()) is not None and is_alive(ddp.process_group)]
        # A rank may still hold a wrapper that it no longer uses, and another rank not: the last one is on all of them.
        reduced = list(filter(has_reduced, reversed(holding)))
        self._is_own = bool(holding) and not reduced
        return reduced[0] if reduced else None

    def moved(self) -> None:
        """Note that the step takes place. If DDP has not reduced its gradients, so does each later one by itself."""
        if self._is_own and not self.have_parted:
            self.have_parted = True
            if log.is_rank_zero():
                log.logger().warning(PARTED)


def _reduced_params(ddp: DistributedDataParallel) -> Iterator[Tensor]:
    """Yield the parameters of the wrapped model without those that DDP ignores, as it may ignore buffers, too."""
    named = ddp.module.named_parameters(remove_duplicate=False)
    return (param for name, param in named if name not in ddp.parameters_to_ignore)


def has_reduced(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP has reduced the gradients of its last backward pass over all of its ranks, which all step.

    It has not in `no_sync` (LocalSGD), and perhaps not with a communication hook: post-localSGD reduces over a node.

    Raises:
        RuntimeError: this torch lacks an attribute that is read.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    over_all = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    return (
        _wrappers[ddp].have_reduced(ddp)
        and all(hook in over_all for hook in communication_hooks(ddp))
        and not is_joining(ddp)
        and not ddp.is_multi_device_module
    )
