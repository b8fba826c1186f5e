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
        was_reduced: for a pass that may have been before; None if there was none.
    """

    def __init__(self, wrapper: DistributedDataParallel, was_reduced: bool | None) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._reduced, self._in_sync = was_reduced, True
        # Sets of parameters that have taken a step since the last pass, by their ids; None before the first pass.
        self._stepped: set[tuple[int, ...]] | None = None if was_reduced is None else set()
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
            self._pass, self._reduced, self._stepped = current, None, set()
            self._in_sync = wrapper.require_backward_grad_sync
            if current >= 0:
                self._times = wrapper.reducer.get_backward_stats()

    def begins_step(self, params: tuple[int, ...]) -> bool:
        """Return whether there was a pass since the last step of parameters, given by their ids; note this step."""
        if self._stepped is None or params in self._stepped:
            return False
        self._stepped.add(params)
        return True

    def have_reduced(self, wrapper: DistributedDataParallel) -> bool:
        """Return whether DDP has reduced the gradients of the last pass over all of its ranks, which all step.

        It has not in `no_sync` (LocalSGD), and perhaps not with a communication hook: post-localSGD reduces over a
        node.

        Raises:
            RuntimeError: this torch lacks an attribute that is read.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        if self._reduced is None:
            has_begun = has_begun_static(wrapper)
            if reduces_in_hooks(wrapper):
                self._reduced = self._in_sync
            else:
                begins = has_begun and not self._has_begun
                self._reduced = begins or wrapper.reducer.get_backward_stats() != self._times
            self._has_begun = has_begun
        over_all = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
        is_whole = all(hook in over_all for hook in communication_hooks(wrapper)) and not wrapper.is_multi_device_module
        return self._reduced and is_whole and not is_joining(wrapper)


_wrappers: weakref.WeakKeyDictionary[DistributedDataParallel, _Passes] = weakref.WeakKeyDictionary()
_registered = 0


def _note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Record a wrapper. Called whenever a module registers a submodule, as a wrapper does with its model."""
    global _registered
    if isinstance(module, DistributedDataParallel) and submodule is not None:
        _registered += 1
        _record(module, submodule, None)


def _note_existing() -> None:
    """Record the wrappers that were made before this module was imported."""
    # Without a process group there are none.
    if dist.is_available() and dist.is_initialized():
        # isinstance would read the `__class__` of any object.
        for made in [made for made in gc.get_objects() if issubclass(type(made), DistributedDataParallel)]:
            if hasattr(made, "reducer"):
                _record(made, made.module, made.require_forward_param_sync and made.require_backward_grad_sync)


def _record(wrapper: DistributedDataParallel, model: nn.Module, was_reduced: bool | None) -> None:
    if wrapper in _wrappers:
        return
    passes = _wrappers[wrapper] = _Passes(wrapper, was_reduced)
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
        self._key: tuple[int, tuple[int, ...]] = (0, ())
        self._holding: list[weakref.ref[DistributedDataParallel]] = []
        self.have_parted = False
        """Whether ranks have different moments, so that each steps without the others."""

    def of_step(self, params: Sequence[Tensor]) -> DistributedDataParallel | None:
        """Return the wrapper that has reduced the gradients of this step, which all of its ranks take, or None.

        Args:
            params: all parameters of an optimizer, after their gradients have been computed.
        """
        if not _wrappers:
            return None
        ids = tuple(map(id, params))
        key = _registered, ids
        if key != self._key:
            stepped = set(params)
            # Without a reducer, the `__init__` of a wrapper has failed.
            complete = (ddp for ddp in list(_wrappers) if hasattr(ddp, "reducer"))
            self._holding = [weakref.ref(ddp) for ddp in complete if stepped <= set(_reduced_params(ddp))]
            self._key = key
        holding = [ddp for ref in self._holding if (ddp := ref()) is not None and is_alive(ddp.process_group)]
        # Without a pass since the last step, as on a rank that had no batch, this one is of no use to others.
        passed = [ddp for ddp in holding if _wrappers[ddp].begins_step(ids)]
        # A rank may still hold a wrapper that it no longer uses, and another rank not: the last one is on all of them.
        reduced = [ddp for ddp in reversed(passed) if _wrappers[ddp].have_reduced(ddp)]
        if passed and not reduced:
            self.part()
        return reduced[0] if reduced else None

    def part(self) -> None:
        """Let this rank take this step and all later ones without the others."""
        if not self.have_parted and log.is_rank_zero():
            log.logger().warning(PARTED)
        self.have_parted = True


def _reduced_params(ddp: DistributedDataParallel) -> Iterator[Tensor]:
    """Yield the parameters of the wrapped model without those that DDP ignores, as it may ignore buffers, too."""
    named = ddp.module.named_parameters(remove_duplicate=False)
    return (param for name, param in named if name not in ddp.parameters_to_ignore)
