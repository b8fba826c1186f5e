"""What a call of an operator asks of an accelerator, by its schema and arguments: launches, and bytes that it moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hf_muon.math.elementwise import Elementwise

FREE = {
    *("view", "_unsafe_view", "t", "transpose", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "unfold"),
    *("split_with_sizes", "as_strided", "permute", "diagonal", "detach", "alias", "narrow", "reshape", "unbind"),
    *("_reshape_alias", "empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "movedim", "set"),
    "wait_tensor",
}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_WRITES_ONLY = {"copy", "fill", "zero", "_foreach_copy", "_foreach_zero"}
# Inductor's kernels take tensors at such addresses.
ALIGNED_BYTES = 16
COLLECTIVES = {
    *("alltoall_base", "_allgather_base", "allgather", "alltoall", "reduce_scatter", "allreduce", "broadcast"),
    "all_gather_into_tensor",
}


@contextlib.contextmanager
def uncompiled(add: Callable[[Elementwise, Sequence[Tensor]], None]) -> Iterator[None]:
    """Have `add` called in place of functions that are compiled on accelerators, for meta tensors."""
    call = Elementwise.__call__

    def replaced(self: Elementwise, *tensors: Tensor, **options: Any) -> None:
        if tensors[0].device.type == "meta":
            add(self, tensors)
        else:
            call(self, *tensors, **options)

    Elementwise.__call__ = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        Elementwise.__call__ = call  # type: ignore[method-assign]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.dtype.itemsize


def traffic_of(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that a call reads and writes."""
    written = {id(tensor) for tensor in tensors_in(result)}
    total = sum(map(nbytes_of, {id(tensor): tensor for tensor in tensors_in(result)}.values()))
    for argument, value in zip(func._schema.arguments, args, strict=False):
        # The fused AdamW kernel writes gradients only where it divides them by the scale of a GradScaler.
        writes = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
        for tensor in tensors_in(value):
            if writes and id(tensor) not in written:
                total += nbytes_of(tensor)  # in-place multi-tensor calls return nothing
            if not (writes and name in _WRITES_ONLY):
                total += nbytes_of(tensor)
    for key, value in kwargs.items():
        if key != "out":
            total += sum(map(nbytes_of, tensors_in(value)))
    return total


def launches_of_lists(args: Sequence[Any]) -> int:
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
