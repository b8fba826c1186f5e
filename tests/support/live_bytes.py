"""The peak memory of tensors, measured by their storages."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Measures `peak`, the most bytes of tensors alive at once that were created inside the context.

    Of DTensors the local tensors count.

    Args:
        device: type of the device whose tensors are measured; None for every device.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.peak: int = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented  # its operations on local tensors follow
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._storages = {key: own for key, own in self._storages.items() if not own[0].expired()}  # type: ignore[no-untyped-call]
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if not torch.is_tensor(leaf) or self.device not in (None, leaf.device.type):
                continue
            if leaf.untyped_storage()._cdata not in inputs:  # neither a view nor in place
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._storages.values()))
        return result
