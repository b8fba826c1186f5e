"""A stand-in for an accelerator: torch's device `standin`, whose tensors are on the CPU.

It computes what the CPU computes, at once, and checks what a real device, which computes later, would do in another
order: if a copy does not block, the host must not touch what it reads or writes before it has waited for the device.

Importing this module registers the device in this process for good; tests do so in processes of their own.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class Device:
    """What the device has done and the host has seen, and what torch asks of the module of a device."""

    class Stream:
        """The one that there is."""

        def synchronize(self):
            DEVICE.seen = DEVICE.time

    def __init__(self):
        # Operations that have been launched, and those that the host has waited for.
        self.time = self.seen = 0
        self.accesses = {}
        self.reset()

    def current_stream(self, device=None):
        return self.Stream()

    def is_available(self):
        return True

    is_initialized = is_available

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def synchronize(self, device=None):
        self.current_stream().synchronize()

    def reset(self):
        self.races, self.copied = [], {"in": 0, "out": 0}

    def run(self, name, reads, writes, blocks):
        """Note an operation of the device."""
        self.time += 1
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                accesses = self.accesses_of(tensor.untyped_storage())
                accesses.append((*_extent(tensor), self.time, writing, name))
                del accesses[:-200]
        if blocks:
            self.seen = self.time

    def run_on_host(self, name, reads, writes):
        """Check what the host does against operations of the device that it has not waited for."""
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                begin, end = _extent(tensor)
                for begin_, end_, time, writing_, name_ in self.accesses_of(tensor.untyped_storage()):
                    if begin < end_ and begin_ < end and (writing or writing_) and time > self.seen:
                        self.races.append(f"{name} on the host after {name_}")

    def accesses_of(self, storage):
        ref, accesses = self.accesses.get(storage._cdata, (None, []))
        if ref is None or ref.expired():
            accesses = []
            self.accesses[storage._cdata] = StorageWeakRef(storage), accesses
        return accesses


def _extent(tensor):
    """Return the addresses between which a tensor lies; of one without elements, two that are between no others."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.dtype.itemsize


DEVICE = Device()


_setup_privateuseone_for_python_backend("standin", backend_module=DEVICE)


class StandIn(torch.Tensor):
    """A tensor of the device; `inner` holds its values."""

    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device="standin:0",
            storage_offset=inner.storage_offset(),
            requires_grad=requires_grad,
        )
        tensor.inner = inner
        return tensor

    def __repr__(self, *, tensor_contents=None):
        return f"StandIn({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatched(func, args, kwargs or {})

    def record_stream(self, stream):
        pass

    def tolist(self):
        DEVICE.run("tolist", [self.inner], [], blocks=True)
        return self.inner.tolist()


_BLOCKING = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")


def _tensors(values):
    return [value for value in tree_leaves(values) if torch.is_tensor(value)]


def _nbytes(tensors):
    return sum(t.numel() * t.dtype.itemsize for t in tensors)


def _dispatched(func, args, kwargs):
    """Compute on the CPU, and note the operation on the device."""
    wrappers = {id(t.inner): t for t in _tensors((args, kwargs)) if isinstance(t, StandIn)}

    def unwrapped(value):
        if isinstance(value, torch.device) and value.type == "standin":
            return torch.device("cpu")
        return value.inner if isinstance(value, StandIn) else value

    inner_args, inner_kwargs = tree_map(unwrapped, list(args)), tree_map(unwrapped, kwargs)
    name, arguments = func._schema.name, func._schema.arguments
    by_name = {a.name: value for a, value in zip(arguments, inner_args, strict=False)} | inner_kwargs
    writes = _tensors([by_name.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write])
    reads = _tensors(by_name)
    before, storages = {id(t) for t in reads}, {t.untyped_storage()._cdata for t in reads}
    result = func(*inner_args, **inner_kwargs)
    outputs = _tensors(result)
    is_view = bool(outputs) and not writes and all(t.untyped_storage()._cdata in storages for t in outputs)
    to_cpu = bool(wrappers) and isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "cpu"
    on_host = name == "aten::copy_" and not isinstance(args[0], StandIn)
    if on_host or to_cpu:
        DEVICE.copied["out"] += _nbytes(outputs)
    elif name in ("aten::copy_", "aten::_to_copy"):
        source = args[1 if name == "aten::copy_" else 0]
        DEVICE.copied["in"] += 0 if isinstance(source, StandIn) else _nbytes(_tensors([source]))
    if not is_view:
        crosses = any(
            not isinstance(t, StandIn) and t.device.type == "cpu" and t.ndim for t in _tensors((args, kwargs))
        )
        at_once = kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])
        blocks = (not at_once and (crosses or to_cpu)) or name in _BLOCKING
        DEVICE.run(name, reads, [*writes, *(t for t in outputs if id(t) not in before)], blocks)
    if to_cpu or on_host:
        return args[0] if on_host else result
    wrappers |= {id(t): StandIn(t) for t in outputs if id(t) not in wrappers}
    return tree_map(lambda value: wrappers[id(value)] if torch.is_tensor(value) else value, result)


_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda func, *args, **kwargs: _dispatched(func, args, kwargs), "PrivateUse1")


class HostAccesses(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes what the host does with its own tensors, so that races with copies are accesses."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves, name = _tensors((args, kwargs)), func._schema.name
        if not any(isinstance(t, StandIn) for t in leaves):
            DEVICE.run_on_host(name, leaves, leaves[:1] if name.endswith("_") else [])
        return func(*args, **kwargs or {})
