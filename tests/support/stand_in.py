"""A stand-in for an accelerator: torch's device `standin`, whose tensors are on the CPU, with streams and a counter.

It computes what the CPU computes, at once. It counts the bytes of its live tensors, and it checks what a real device
with streams would do in another order: two operations of which one writes what the other one reads or writes must be
ordered by events and waits, and so must the host and a copy that does not block.

Importing this module registers the device in this process for good; tests do so in processes of their own.
"""

from __future__ import annotations

import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

HOST = "host"


class Stream:
    """A stream with a vector clock: of each stream, the last operation that has ended before the next one of this."""

    def __init__(self, device=None, name="stream"):
        self.name, self.clock = f"{name} {id(self)}", {}

    def wait_stream(self, other):
        _join(self.clock, other.clock)

    def wait_event(self, event):
        _join(self.clock, event.clock)

    def synchronize(self):
        _join(DEVICE.host, self.clock)


class Event:
    clock = {}

    def record(self, stream=None):
        self.clock = dict((stream or DEVICE.stream).clock)

    def synchronize(self):
        _join(DEVICE.host, self.clock)


def _join(clock, other):
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


class Device:
    """The state of the device, and what torch asks of the module of a device."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.stream = Stream(name="default")
        self.host = {}
        self.live, self.peak, self.launches = {}, 0, 0
        self.accesses = {}
        self.races = []
        self.copied = {"in": 0, "out": 0}
        self.dtypes = set()

    def current_stream(self, device=None):
        return self.stream

    @contextlib.contextmanager
    def use(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

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
        _join(self.host, self.stream.clock)

    # --- memory

    def nbytes(self):
        """Return the bytes of live tensors."""
        self.live = {key: (ref, nbytes) for key, (ref, nbytes) in self.live.items() if not ref.expired()}
        return sum(nbytes for _, nbytes in self.live.values())

    def reset(self):
        self.peak, self.launches, self.races, self.copied = self.nbytes(), 0, [], {"in": 0, "out": 0}
        self.dtypes = set()

    def hold(self, storage):
        """Count a storage for as long as it lives."""
        if storage._cdata in self.live and not self.live[storage._cdata][0].expired():
            return
        self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.nbytes())

    # --- order

    def run(self, name, reads, writes, blocks):
        """Note an operation on the current stream, or on the host, and check it against earlier ones."""
        self.launches += 1
        stream = self.stream
        _join(stream.clock, self.host)
        time = stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self.check(name, stream.name, time, stream.clock, reads, writes)
        if blocks:
            _join(self.host, stream.clock)

    def run_on_host(self, name, reads, writes):
        time = self.host[HOST] = self.host.get(HOST, 0) + 1
        self.check(name, HOST, time, self.host, reads, writes)

    def accesses_of(self, storage):
        ref, accesses = self.accesses.get(storage._cdata, (None, []))
        if ref is None or ref.expired():
            accesses = []
            self.accesses[storage._cdata] = StorageWeakRef(storage), accesses
        return accesses

    def check(self, name, stream, time, clock, reads, writes):
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                if not tensor.numel():
                    continue
                begin = tensor.data_ptr()
                extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                end = begin + extent * tensor.dtype.itemsize
                accesses = self.accesses_of(tensor.untyped_storage())
                for begin_, end_, stream_, time_, writing_, name_ in accesses:
                    overlaps = begin < end_ and begin_ < end
                    if overlaps and (writing or writing_) and stream_ != stream and clock.get(stream_, 0) < time_:
                        self.races.append(f"{name} on {stream} after {name_} on {stream_}")
                accesses.append((begin, end, stream, time, writing, name))
                del accesses[:-200]


DEVICE = Device()
Device.stream_context = Device.use


class _Module:
    """torch.get_device_module("standin"): `stream` is a function there, and what the device says otherwise."""

    Stream, Event = Stream, Event
    stream = staticmethod(lambda stream: DEVICE.use(stream))

    def __getattr__(self, name):
        return getattr(DEVICE, name)


_setup_privateuseone_for_python_backend("standin", backend_module=_Module())


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
        DEVICE.hold(inner.untyped_storage())
        DEVICE.dtypes.add(inner.dtype)
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
