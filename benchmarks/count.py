"""Count what a step would ask of an accelerator: kernel launches, reads by the host, bytes of elementwise traffic.

Nothing is measured. Tensors are on the meta device, where hf_muon takes the paths that it takes on accelerators.

- A launch is a call of an operator that is not a view and does not only allocate. A multi-tensor call (``_foreach``) is
  one launch where its lists have equal dtypes and strides, so that torch takes one kernel for many tensors, and one for
  each tensor where they do not.
- A function that hf_muon compiles on accelerators (`Elementwise`) is one launch, which reads and writes each of its
  tensors once.
- Traffic is what operators other than products read and write.
- A read is a call that makes the host wait for the device: ``item``, ``tolist``, ``bool``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

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


class Count(TorchDispatchMode):
    """Counts the operators that run while it is active.

    Args:
        device: type of the device on which they run; tensors on a CPU beside another device are numbers.

    Attributes:
        launches: by name.
        traffic: bytes that elementwise operators read and write, by name.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.launches: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1].rstrip("_")
        tensors = [*_tensors(args), *_tensors(kwargs), *_tensors(result)]
        if name not in _FREE and any(tensor.device.type == self.device for tensor in tensors):
            self.launches[name] += _slow_calls(args) if name.startswith("_foreach") else 1
            if name not in _PRODUCTS:
                self.traffic[name] += _bytes_of(function, name, args, kwargs or {}, result)
        return result

    def add(self, function: Elementwise, tensors: Sequence[Tensor]) -> None:
        """Count one call of a function that is compiled on accelerators."""
        self.launches[function.name] += 1
        self.traffic[function.name] += sum(_nbytes(tensors[i]) for i in (*function.reads, *function.writes))


@contextlib.contextmanager
def counting(device: str = "meta") -> Iterator[Count]:
    """Count the operators and the compiled functions of the `with` block, on a type of device."""
    count = Count(device)
    call = Elementwise.__call__

    def counted(self: Elementwise, *tensors: Tensor, **options: Any) -> None:
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


def _bytes_of(function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that a call reads and writes."""
    written = {id(tensor) for tensor in _tensors(result)}
    total = sum(map(_nbytes, {id(tensor): tensor for tensor in _tensors(result)}.values()))
    for argument, value in zip(function._schema.arguments, args, strict=False):
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


def _slow_calls(args: Sequence[Any]) -> int:
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
