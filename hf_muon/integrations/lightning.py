"""Lightning and Fabric under DDP: the ranks share the work of a `Muon` that was built from the bare model.

Both take optimizers of the bare model, whose parameters do not know of DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from hf_muon._autoload import Change
from hf_muon.integrations.replicas import add_wrapped, share_work


def patch_trainer(module: ModuleType) -> Iterator[Change]:
    """Patch `DDPStrategy.setup_optimizers` of Lightning's Trainer."""

    def share(strategy: Any, _: Any) -> None:
        add_wrapped([strategy.model])
        share_work(strategy.optimizers)

    yield _call_after(module.DDPStrategy, "setup_optimizers", share)


def patch_fabric(module: ModuleType) -> Iterator[Change]:
    """Patch `setup_module` and `setup_optimizer` of Fabric's `DDPStrategy`."""
    yield _call_after(module.DDPStrategy, "setup_module", lambda _, wrapped: add_wrapped([wrapped]))
    yield _call_after(module.DDPStrategy, "setup_optimizer", lambda _, optimizer: share_work([optimizer]))


def _call_after(kind: type, name: str, then: Callable[[Any, Any], None]) -> Change:
    """Have a method, the class's own or an inherited one, followed by `then(self, result)`."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(self, result)
        return result

    return kind, name, method
