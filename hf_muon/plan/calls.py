"""The calls of operators in a step: products, launches of kernels, bytes of elementwise traffic.

- A launch is a call of an operator that is not a view and does not only allocate. A multi-tensor call (``_foreach``) is
  one launch where its lists have equal dtypes and strides, so that torch takes one kernel for many tensors, and one for
  each tensor where they do not.
- A function that is compiled on accelerators (`Elementwise`) is one launch, which reads and writes each of its tensors
  once; tensors that are not aligned are copied first, and back.
- Traffic is what operators other than products read and write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_muon.math.elementwise import Elementwise

_FREE = {
    *("view", "_unsafe_view", "t", "transpose", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "unfold"),
    *("split_with_sizes", "as_strided", "permute", "diagonal", "detach", "alias", "narrow", "reshape", "unbind"),
    *("_reshape_alias", "empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "movedim", "set"),
}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_WRITES_ONLY = {"copy", "fill", "zero", "_foreach_copy", "_foreach_zero"}
_ALIGNED_BYTES = 16
_COLLECTIVES = {"alltoall_base", "_allgather_base", "allgather", "alltoall", "reduce_scatter", "allreduce", "broadcast"}


class Operand(NamedTuple):
    """A tensor of a product: its shape and strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """A product ``(B, m, k) @ (B, k, n)``, or one of plain matrices.

    Attributes:
        operands: left, right, result, and what is added if anything is.
        dtype: of the operands.
    """

    operands: tuple[Operand, ...]
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """``(B, m, n, k)``."""
        *batch, m, k = self.operands[0].shape
        return (batch[0] if batch else 1), m, self.operands[1].shape[-1], k

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        batch, m, n, k = self.sizes
        return 2 * batch * m * n * k

    @property
    def nbytes(self) -> int:
        """Bytes of the operands, each read or written once."""
        batch, m, n, k = self.sizes
        results = len(self.operands) - 2
        return batch * (m * k + k * n + results * m * n) * self.dtype.itemsize


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        name: of the operator, without its namespace.
        launches: of kernels.
        traffic: bytes that it reads and writes; 0 for products.
        product: what is multiplied; None for other operators.
    """

    name: str
    launches: int
    traffic: int
    product: Product | None = None

    @property
    def is_collective(self) -> bool:
        """Whether it sends something to other ranks."""
        return self.name in _COLLECTIVES


class Calls(TorchDispatchMode):
    """Records the operators that run while it is active.

    Args:
        device: type of the device on which they run; tensors on a CPU beside another device are numbers.

    Attributes:
        calls: in their order.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        name = name.rstrip("_")
        if name not in _FREE and namespace != "prim":  # questions that fake tensors ask
            tensors = [*_tensors(args), *_tensors(kwargs), *_tensors(result)]
            if any(tensor.device.type == self.device for tensor in tensors):
                self.record(self._call(func, name, args, kwargs or {}, result))
        return result

    def record(self, call: Call) -> None:
        """Add a call."""
        self.calls.append(call)

    def add(self, function: Elementwise, tensors: Sequence[Tensor]) -> None:
        """Record one call of a function that is compiled on accelerators."""
        odd = {i for i, t in enumerate(tensors) if t.ndim and t.storage_offset() * t.dtype.itemsize % _ALIGNED_BYTES}
        for i in (*odd, *odd.intersection(function.writes)):
            self.record(Call("clone", 1, 2 * _nbytes(tensors[i])))
        traffic = sum(_nbytes(tensors[i]) for i in (*function.reads, *function.writes))
        self.record(Call(function.name, 1, traffic))

    def _call(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Call:
        launches = _launches_of_lists(args) if name.startswith("_foreach") else 1
        if name in _PRODUCTS:
            return Call(name, launches, 0, _product(args, result))
        return Call(name, launches, _bytes_of(func, name, args, kwargs, result))


@contextlib.contextmanager
def recording(calls: Calls) -> Iterator[None]:
    """Record the operators and the compiled functions of the `with` block."""
    call = Elementwise.__call__

    def recorded(self: Elementwise, *tensors: Tensor, **options: Any) -> None:
        if tensors[0].device.type == "meta":
            calls.add(self, tensors)
        else:
            call(self, *tensors, **options)

    Elementwise.__call__ = recorded  # type: ignore[method-assign]
    try:
        with calls:
            yield
    finally:
        Elementwise.__call__ = call  # type: ignore[method-assign]


def _product(args: Sequence[Any], result: Tensor) -> Product:
    """Return a product, of ``(left, right)`` or of ``(added, left, right)``."""
    *added, left, right = (value for value in args if isinstance(value, Tensor))
    operands = (Operand(tuple(t.shape), tuple(t.stride())) for t in (left, right, result, *added))
    return Product(tuple(operands), left.dtype)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _bytes_of(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that a call reads and writes."""
    written = {id(tensor) for tensor in _tensors(result)}
    total = sum(map(_nbytes, {id(tensor): tensor for tensor in _tensors(result)}.values()))
    for argument, value in zip(func._schema.arguments, args, strict=False):
        # The fused AdamW kernel writes gradients only where it divides them by the scale of a GradScaler.
        writes = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
        for tensor in _tensors(value):
            if writes and id(tensor) not in written:
                total += _nbytes(tensor)  # in-place multi-tensor calls return nothing
            if not (writes and name in _WRITES_ONLY):
                total += _nbytes(tensor)
    for key, value in kwargs.items():
        if key != "out":
            total += sum(map(_nbytes, _tensors(value)))
    return total


def _launches_of_lists(args: Sequence[Any]) -> int:
    """Return the launches of a multi-tensor call, see the module."""
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
