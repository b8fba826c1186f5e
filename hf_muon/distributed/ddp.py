"""DistributedDataParallel: in which steps its ranks share the work of an optimizer, whoever has built that.

An optimizer has parameters, which do not know of the wrapper around their model, and wrappers are made before or after
it. So each wrapper is noted when it registers its model, and each step asks the wrappers that hold its parameters.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hf_muon.distributed.groups import is_alive
from hf_muon.math.torch_private import communication_hooks, is_joining

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_registered = 0


def _note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Note a wrapper; called whenever a module registers a submodule, as a wrapper does with its model."""
    global _registered
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)
        _registered += 1


def _note_existing() -> None:
    """Note the wrappers that were made before this module was imported."""
    if dist.is_available() and dist.is_initialized():  # without a process group there are none
        # isinstance would read the `__class__` of any object.
        _wrappers.update([made for made in gc.get_objects() if issubclass(type(made), DistributedDataParallel)])


register_module_module_registration_hook(_note)
_note_existing()


class Replicas:
    """The wrappers that hold all parameters of an optimizer, whose ranks have the same parameters and moments.

    They have, as long as every step takes gradients that were reduced over all of them. After another step, as in
    `no_sync`, each rank has moments of its own, and steps alone from then on.
    """

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._holding: list[weakref.ref[DistributedDataParallel]] = []
        self._have_parted = False

    def of_step(self, params: Sequence[Tensor]) -> ProcessGroup | None:
        """Return the process group whose ranks share this step; None if each of them takes it alone.

        Args:
            params: of an optimizer, after their gradients have been computed.
        """
        if not _wrappers or self._have_parted:
            return None
        key = (_registered, *map(id, params))
        if key != self._key:
            own = set(params)
            whole = (ddp for ddp in list(_wrappers) if hasattr(ddp, "reducer"))  # its `__init__` has not failed
            self._holding = [weakref.ref(ddp) for ddp in whole if own <= set(ddp.parameters())]
            self._key = key
        holding = [ddp for ref in self._holding if (ddp := ref()) is not None and is_alive(ddp.process_group)]
        if not holding or any(map(is_joining, holding)):
            return None
        groups = {ddp.process_group for ddp in holding}
        self._have_parted = len(groups) > 1 or not all(map(has_reduced, holding))
        return None if self._have_parted else groups.pop()


def has_reduced(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP has reduced the gradients of its last forward pass, all of them, over all of its ranks.

    It has not in `no_sync` (LocalSGD), and perhaps not with a communication hook: post-localSGD reduces over a node.

    Raises:
        RuntimeError: this torch does not say so where it is looked for.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    over_all = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    return (
        ddp.require_backward_grad_sync
        and ddp.require_forward_param_sync  # of the last forward pass, where the other one is of this moment
        and all(hook in over_all for hook in communication_hooks(ddp))
        and not ddp.parameters_to_ignore
        and not ddp.is_multi_device_module
    )
