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
from hf_muon.plan.operators import (
    ALIGNED_BYTES,
    COLLECTIVES,
    FREE,
    PRODUCTS,
    launches_of_lists,
    nbytes_of,
    tensors_in,
    traffic_of,
    uncompiled,
)


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
        return self.name in COLLECTIVES


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
        if name not in FREE and namespace != "prim":  # questions that fake tensors ask
            tensors = [*tensors_in(args), *tensors_in(kwargs), *tensors_in(result)]
            if any(tensor.device.type == self.device for tensor in tensors):
                self.record(self._call(func, name, args, kwargs or {}, result))
        return result

    def record(self, call: Call) -> None:
        """Add a call."""
        self.calls.append(call)

    def add(self, function: Elementwise, tensors: Sequence[Tensor]) -> None:
        """Record one call of a function that is compiled on accelerators."""
        odd = {i for i, t in enumerate(tensors) if t.ndim and t.storage_offset() * t.dtype.itemsize % ALIGNED_BYTES}
        for i in (*odd, *odd.intersection(function.writes)):
            self.record(Call("clone", 1, 2 * nbytes_of(tensors[i])))
        traffic = sum(nbytes_of(tensors[i]) for i in (*function.reads, *function.writes))
        self.record(Call(function.name, 1, traffic))

    def _call(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Call:
        launches = launches_of_lists(args) if name.startswith("_foreach") else 1
        if name in PRODUCTS:
            return Call(name, launches, 0, _product(args, result))
        return Call(name, launches, traffic_of(func, name, args, kwargs, result))


@contextlib.contextmanager
def recording(calls: Calls) -> Iterator[None]:
    """Record the operators and the compiled functions of the `with` block."""
    with uncompiled(calls.add), calls:
        yield


def _product(args: Sequence[Any], result: Tensor) -> Product:
    """Return a product, of ``(left, right)`` or of ``(added, left, right)``."""
    *added, left, right = (value for value in args if isinstance(value, Tensor))
    operands = (Operand(tuple(t.shape), tuple(t.stride())) for t in (left, right, result, *added))
    return Product(tuple(operands), left.dtype)
