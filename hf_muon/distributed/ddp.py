"""DistributedDataParallel: find the steps in which its ranks share the work of an optimizer.

Parameters have no reference to the wrapper around their model, and the wrapper may be made before or after the
optimizer. So each wrapper is recorded when it registers its model, and each step looks up the wrappers that hold its
parameters.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hf_muon.diagnostics import log
from hf_muon.distributed.groups import is_alive
from hf_muon.math.torch_private import communication_hooks, disable_dynamo, is_joining

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Passes:
    """What the passes through a wrapper do to gradients.

    DDP decides in a forward pass whether the next backward pass reduces. No attribute of it says what a backward pass
    did: each later forward pass writes over them, also one without gradients.

    Attributes:
        reduced: whether the last backward pass that has accumulated gradients has reduced them; true before the first.
        reduces: whether the next one does: a forward pass since the last one has asked for it.
        is_done: whether it has come, so that `reduces` is of a past one.
    """

    def __init__(self, reduced: bool) -> None:
        self.reduced, self.reduces, self.is_done = reduced, False, False

    def forward(self, reduces: bool) -> None:
        """Note a forward pass with gradients."""
        self.reduces = reduces or (self.reduces and not self.is_done)
        self.is_done = False

    def backward(self, _: Tensor) -> None:
        """Note that a gradient was accumulated."""
        self.reduced, self.is_done = self.reduces, True

    def step(self) -> None:
        """Note a step: a backward pass past the wrapper, which may follow, reduces nothing."""
        self.reduces = self.reduces and not self.is_done


class _Hook:
    """The forward hook of all wrappers. Copies and pickles of them have one without effect, which loads without us."""

    @disable_dynamo
    def __call__(self, wrapper: DistributedDataParallel, *_: Any) -> None:
        if torch.is_grad_enabled():
            _wrappers[wrapper].forward(wrapper.require_backward_grad_sync)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


_hook = _Hook()
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
    passes = _wrappers[wrapper] = _Passes(reduced)
    wrapper.register_forward_hook(_hook)
    handles = [
        param.register_post_accumulate_grad_hook(passes.backward)  # type: ignore[no-untyped-call]
        for param in model.parameters()
        if param.requires_grad
    ]
    weakref.finalize(wrapper, lambda: [handle.remove() for handle in handles]).atexit = False


register_module_module_registration_hook(_note)
_note_existing()


PARTED = (
    "DDP has not reduced the gradients of this step (no_sync, or a communication hook): ranks have moments of their "
    "own, and from now on each of them orthogonalizes all matrices [ranks-part]"
)


class Replicas:
    """The wrappers that hold all parameters of an optimizer, whose ranks have the same parameters and moments.

    Ranks remain equal as long as the gradients of every step were reduced over all of them. After another step, as in
    `no_sync`, each rank has different moments, and steps without the others from then on.
    """

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._holding: list[weakref.ref[DistributedDataParallel]] = []
        self._have_parted = False
        self.are_reduced = True
        """Whether DDP has reduced the gradients of this step. If not, ranks part, or the step fails if they differ."""

    def of_step(self, params: Sequence[Tensor]) -> ProcessGroup | None:
        """Return the process group whose ranks take this step together; None if each takes it without the others.

        Args:
            params: all parameters of an optimizer, after their gradients have been computed.
        """
        self.are_reduced = True
        if not _wrappers or self._have_parted:
            return None
        key = (_registered, *map(id, params))
        if key != self._key:
            stepped = set(params)
            # Without a reducer, the `__init__` of a wrapper has failed.
            complete = (ddp for ddp in list(_wrappers) if hasattr(ddp, "reducer"))
            self._holding = [weakref.ref(ddp) for ddp in complete if stepped <= set(ddp.parameters())]
            self._key = key
        holding = [ddp for ref in self._holding if (ddp := ref()) is not None and is_alive(ddp.process_group)]
        groups = {ddp.process_group for ddp in holding}
        if len(groups) != 1 or any(map(is_joining, holding)):
            return None
        # Any of them: a model may have a wrapper that it no longer uses.
        self.are_reduced = any(map(has_reduced, holding))
        for ddp in holding:
            _wrappers[ddp].step()
        return groups.pop()

    def part(self) -> None:
        """Let each rank take this step and all later ones without the others. All ranks call this together."""
        self._have_parted = True
        if log.is_rank_zero():
            log.logger().warning(PARTED)


def has_reduced(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP has reduced the gradients of its last backward pass, all of them, over all of its ranks.

    It has not in `no_sync` (LocalSGD), and perhaps not with a communication hook: post-localSGD reduces over a node.

    Raises:
        RuntimeError: this torch lacks the attribute that is read.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    over_all = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    return (
        _wrappers[ddp].reduced
        and all(hook in over_all for hook in communication_hooks(ddp))
        and not ddp.parameters_to_ignore
        and not ddp.is_multi_device_module
    )
