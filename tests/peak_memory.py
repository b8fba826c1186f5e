"""The peak memory of tensors, measured by their storages."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Measures `peak`: the largest total size in bytes of live tensors that were created inside the context."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.storages = {key: (ref, nbytes) for key, (ref, nbytes) in self.storages.items() if not ref.expired()}
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage()._cdata not in inputs:  # neither a view nor in place
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))
        return result
