"""Count what a step would ask of an accelerator: kernel launches, waits of the host, bytes of elementwise traffic.

Nothing is measured. Tensors are on the meta device, where hf_muon runs the code for accelerators.

- A launch is a call of an operator that is not a view and does not only allocate. A multi-tensor call (``_foreach``) is
  one launch if its lists have equal dtypes and strides, so that torch has one kernel for many tensors, and otherwise
  one launch for each tensor. (torch cuts it into kernels of at most 320 blocks of 65,536 elements, each of which
  takes longer than a launch.)
- Some operators copy before they compute, in kernels that are not separate calls: a product with an addend that is not
  its output (cuBLAS has one matrix for both), and a reduction in a wider dtype than its input. Each adds a launch, and
  traffic.
- A function that hf_muon compiles on accelerators (`Elementwise`) is one launch, which reads and writes each of its
  tensors once, and in addition the copies of tensors that are not aligned.
- Traffic is what operators other than products read and write in the accelerator's memory.
- A wait is a call in which the host waits for the accelerator: a read (``item``, ``tolist``, ``bool``), a copy between
  both memories that is not ``non_blocking``, and ``synchronize`` of a stream or an event. Reads return `answer`.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_muon.math.elementwise import Elementwise

_FREE = {
    *("view", "_unsafe_view", "t", "transpose", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "unfold"),
    *("split_with_sizes", "as_strided", "permute", "diagonal", "detach", "alias", "narrow", "reshape", "unbind"),
    *("_reshape_alias", "empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "movedim", "set"),
    "wait_tensor",
}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
# Reductions that first convert their input to `dtype`; those of half precision to fp32 convert as they read.
_CONVERTING = {"linalg_vector_norm", "sum", "mean", "prod"}
_LAUNCHES = {"eye": 2}  # zeros, and the diagonal
_WRITES_ONLY = {"copy", "fill", "zero", "_foreach_copy", "_foreach_zero"}
# Inductor's kernels need tensors at multiples of this address.
_ALIGNED_BYTES = 16
_COLLECTIVES = {
    *("alltoall_base", "_allgather_base", "allgather", "alltoall", "reduce_scatter", "allreduce", "broadcast"),
    "all_gather_into_tensor",
}
_COPIES = {"copy", "_to_copy"}


class Count(TorchDispatchMode):
    """Counts the operators that run while it is active.

    Attributes:
        launches: by name.
        traffic: bytes that elementwise operators read and write, by name.
        waits: of the host, by name.
        host_bytes: copied between the host's memory and the device's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.host_bytes = 0

    @property
    def products(self) -> int:
        """Launches of matrix products."""
        return sum(self.launches[name] for name in _PRODUCTS)

    @property
    def collectives(self) -> int:
        """Calls of torch.distributed."""
        return sum(self.launches[name] for name in _COLLECTIVES)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented  # its operators on local tensors follow
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1].rstrip("_")
        if name == "_local_scalar_dense" and args[0].is_meta:
            self.waits["item"] += 1
            return answer(args[0]).item()
        if name in _COPIES and self._crosses(name, args, kwargs):
            return self._copied(function, name, args, kwargs)
        result = function(*args, **kwargs)
        tensors = _tensors_in((args, kwargs, result))
        if name not in _FREE and any(tensor.is_meta for tensor in tensors):
            self.launches[name] += _launches_of_lists(args) if name.startswith("_foreach") else _LAUNCHES.get(name, 1)
            if name not in _PRODUCTS:
                self.traffic[name] += _traffic_of(function, name, args, kwargs, result)
            if copied := _copied_inside(name, args, kwargs, result):
                self.launches["copy inside"] += 1
                self.traffic["copy inside"] += copied
        return result

    def add(self, function: Elementwise, arguments: Sequence[Tensor | float]) -> None:
        """Count one call of a function that is compiled on accelerators."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        odd = {k for k, t in enumerate(tensors) if t.storage_offset() * t.dtype.itemsize % _ALIGNED_BYTES}
        copies = [*odd, *odd.intersection(function.writes)]
        self.launches[function.name] += 1
        self.traffic[function.name] += sum(_nbytes_of(tensors[i]) for i in (*function.reads, *function.writes))
        if copies:
            self.launches["clone"] += len(copies)
            self.traffic["clone"] += 2 * sum(_nbytes_of(tensors[i]) for i in copies)

    def _crosses(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether a copy is between the host's memory and the device's."""
        if name == "copy":
            return bool(args[0].is_meta != args[1].is_meta and args[0].numel())
        target = kwargs.get("device")
        return bool(args[0].numel()) and target is not None and (target.type == "meta") != args[0].is_meta

    def _copied(self, function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Count a copy between the two memories, and return its result."""
        source = args[1] if name == "copy" else args[0]
        is_free = kwargs.get("non_blocking") or (name == "copy" and len(args) > 2 and args[2])
        self.launches[name] += 1
        self.traffic[name] += _nbytes_of(source)
        self.host_bytes += _nbytes_of(source)
        if not is_free:
            self.waits["copy to the host" if source.is_meta else "copy to the device"] += 1
        if name == "copy":
            return args[0].copy_(answer(source)) if source.is_meta and source.ndim < 2 else args[0]
        if source.is_meta:
            return answer(source).to(kwargs.get("dtype") or source.dtype)
        return function(*args, **kwargs)


def answer(tensor: Tensor) -> Tensor:
    """Return the values of a meta tensor, as if gradients were finite and not zero.

    Bools are true, as for checks that pass. Two numbers are the result of a check: no error, and nonzero gradients.
    Others are zeros.
    """
    if tensor.dtype is torch.bool:
        return torch.ones(tensor.shape, dtype=torch.bool)
    values = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dtype is torch.int64 and tensor.shape == (2,):
        values[1] = 1
    return values


@contextlib.contextmanager
def counting() -> Iterator[Count]:
    """Count the operators and the compiled functions of the `with` block."""
    count, call = Count(), Elementwise.__call__

    def counted(self: Elementwise, *tensors: Tensor | float, **options: Any) -> None:
        if tensors[0].device.type == "meta":
            count.add(self, tensors)
        else:
            call(self, *tensors, **options)

    Elementwise.__call__ = counted  # type: ignore[method-assign]
    try:
        with count:
            yield count
    finally:
        Elementwise.__call__ = call  # type: ignore[method-assign]


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.dtype.itemsize


def _traffic_of(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that a call reads and writes."""
    written = {id(tensor) for tensor in _tensors_in(result)}
    total = sum(map(_nbytes_of, {id(tensor): tensor for tensor in _tensors_in(result)}.values()))
    for argument, value in zip(func._schema.arguments, args, strict=False):
        # The fused AdamW kernel writes gradients only where it divides them by the scale of a GradScaler.
        writes = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
        for tensor in _tensors_in(value):
            if writes and id(tensor) not in written:
                total += _nbytes_of(tensor)  # in-place multi-tensor calls return nothing
            if not (writes and name in _WRITES_ONLY):
                total += _nbytes_of(tensor)
    for key, value in kwargs.items():
        if key != "out":
            total += sum(map(_nbytes_of, _tensors_in(value)))
    return total


def _copied_inside(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operator reads and writes for a copy before it computes; 0 if it makes none."""
    first: Any = args[0] if args else None
    if name in ("addmm", "baddbmm") and kwargs.get("beta", 1) != 0 and not _is_same(first, result):
        held = math.prod(n for n, stride in zip(first.shape, first.stride(), strict=True) if stride)
        return int(held * first.dtype.itemsize + _nbytes_of(result))
    dtype = kwargs.get("dtype")
    if name in _CONVERTING and dtype not in (None, first.dtype) and (first.dtype.itemsize > 2 or dtype.itemsize > 4):
        return int(2 * first.numel() * dtype.itemsize)  # written, and read in place of the input
    return 0


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same elements in memory, which torch does not copy."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and [one.storage_offset(), *one.shape, *one.stride()] == [
        other.storage_offset(),
        *other.shape,
        *other.stride(),
    ]


def _launches_of_lists(args: Sequence[Any]) -> int:
    """Return the launches of a multi-tensor call: one if torch has a kernel for its lists, or one for each tensor."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)]
    if not lists:
        return 1
    alike = all(len({tensor.dtype for tensor in tensors}) == 1 for tensors in lists) and all(
        len({tensor.stride() for tensor in row}) == 1 and _is_dense(row[0]) for row in zip(*lists, strict=True)
    )
    return 1 if alike else len(lists[0])


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has no gaps between its elements, in whatever order its dims are."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: dim[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
