"""Lightning and Fabric under DDP: the ranks share the work of a `Muon` that was built from the bare model.

Both take optimizers of the bare model, whose parameters do not know of DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_muon.integrations.names import is_ours, mark
from hf_muon.integrations.replicas import add_wrapped, share_work


def patch_trainer(module: ModuleType) -> Callable[[], None] | None:
    """Patch `DDPStrategy.setup_optimizers` of Lightning's Trainer."""
    kind = module.DDPStrategy
    if is_ours(kind.setup_optimizers):
        return None

    def share(strategy: Any, _: Any) -> None:
        add_wrapped([strategy.model])
        share_work(strategy.optimizers)

    return _call_after(kind, "setup_optimizers", share)


def patch_fabric(module: ModuleType) -> Callable[[], None] | None:
    """Patch `setup_module` and `setup_optimizer` of Fabric's `DDPStrategy`."""
    kind = module.DDPStrategy
    if is_ours(kind.setup_module):
        return None
    undo_module = _call_after(kind, "setup_module", lambda _, wrapped: add_wrapped([wrapped]))
    undo_optimizer = _call_after(kind, "setup_optimizer", lambda _, optimizer: share_work([optimizer]))

    def undo() -> None:
        undo_optimizer()
        undo_module()

    return undo


def _call_after(kind: type, name: str, then: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Have a method, the class's own or an inherited one, followed by `then(self, result)`; return how to undo that."""
    own, original = kind.__dict__.get(name), getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(self, result)
        return result

    setattr(kind, name, mark(method))

    def undo() -> None:
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)

    return undo
