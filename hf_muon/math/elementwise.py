"""Elementwise functions, many tensors at once: compiled into one kernel where torch can, in chunks elsewhere.

There is one source for all devices, and each of its operations is rounded once: a compiled function has the bits of the
plain one. Functions take flat tensors, so that one compilation serves every shape, and write into their arguments. They
are functions of single elements: where an element lies does not change its result, so that every layout is
bit-identical to a single process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hf_muon.math import compiler
from hf_muon.math.torch_private import storage_id


class _Numbers(NamedTuple):
    """What a kind of device is good at.

    Attributes:
        copied_bytes: copying so many bytes takes as long as several calls.
        run_bytes: bound on the copies of small tensors that are worked on at once.
        chunk: elements that a function which is not compiled works on at once, because of its temporary tensors.
    """

    copied_bytes: int
    run_bytes: int
    chunk: int


Number = float | Tensor
"""An argument of an `Elementwise` that is no flat tensor; where it is compiled, a tensor of no dims."""

_HOSTS = {"cpu", "mps"}  # nobody has counted on MPS
_ON_HOST = _Numbers(2**18, 2**20, 2**17)  # a chunk stays in a core's cache
_ON_ACCELERATOR = _Numbers(56 * 2**20, 224 * 2**20, 2**22)  # 20 us at 3 TB/s
_ALIGNED_BYTES = 16


def is_accelerator(device: torch.device) -> bool:
    """Return whether launches cost more than memory here; also on the meta device, so that they can be counted."""
    return device.type not in _HOSTS


def _numbers(device: torch.device) -> _Numbers:
    return _ON_ACCELERATOR if is_accelerator(device) else _ON_HOST


def chunk_size(device: torch.device) -> int:
    """Return how many elements to work on at once on a device where functions are not compiled."""
    return _numbers(device).chunk


def as_tensor(argument: Tensor | float) -> Tensor:
    """Return an argument of a function as a compiler gets it, which compiles anew for each number of Python's."""
    if isinstance(argument, Tensor):
        return argument
    return torch.tensor(argument, dtype=torch.int32 if isinstance(argument, int) else torch.float64)


class Elementwise:
    """A function of flat tensors that writes into some of them: compiled where torch can, otherwise in chunks.

    Args:
        function: of flat tensors, or of rows ``(R, n)`` and ``(R,)``; of numbers; and of options, each combination of
            which is compiled.
        reads: positions of the tensors that it reads.
        writes: positions of the tensors that it writes.
        row: the only length of its rows; None for any.
    """

    def __init__(
        self, function: Callable[..., None], *, reads: Sequence[int], writes: Sequence[int], row: int | None = None
    ) -> None:
        self.plain = function
        self.row = row
        self.name = cast(FunctionType, function).__name__.strip("_")
        self.reads = reads
        self.writes = writes

    def __call__(self, first: Tensor, *arguments: Tensor | float, **options: Any) -> None:
        """Call the function. On the meta device one call of an operator stands for it."""
        if first.device.type == "meta":
            first.copy_(first)
        elif not first.numel():
            pass
        elif compiler.is_compiled(first.device):
            self._call_compiled(*map(as_tensor, (first, *arguments)), **options)
        else:
            # Tensors that are passed twice stay the same one: a function may read one that it writes.
            tensors = [first, *(argument for argument in arguments if isinstance(argument, Tensor))]
            parts = {id(tensor): torch.split(tensor, rows_per_chunk(first)) for tensor in tensors}
            for chunk in zip(*(parts[id(tensor)] for tensor in tensors), strict=True):
                self.plain(*chunk, *arguments[len(tensors) - 1 :], **options)

    def _call_compiled(self, *tensors: Tensor, **options: Any) -> None:
        # Inductor copies tensors that are not aligned, and what early versions then write stays in the copies.
        odd = {id(tensor): tensor.clone() for tensor in tensors if tensor.ndim and tensor.data_ptr() % _ALIGNED_BYTES}
        if odd:
            self._call_compiled(*(odd.get(id(tensor), tensor) for tensor in tensors), **options)
            for tensor in (tensors[k] for k in self.writes):
                if id(tensor) in odd:
                    tensor.copy_(odd[id(tensor)])
            return
        compiler.call(self.plain, tensors, options, self.row)


def rows_per_chunk(tensor: Tensor) -> int:
    """Return how many indices of a tensor's first dim, at least one, make a chunk."""
    return max(1, chunk_size(tensor.device) // max(1, tensor.shape[1:].numel()))


def most_elements(max_bytes: int) -> int:
    """Return how many elements, with fp32 results that `over` writes and copies of them, take at most some bytes."""
    return max(max_bytes // 8, (max_bytes - _ON_ACCELERATOR.run_bytes) // 4)


def is_large(copied_bytes: int, device: torch.device) -> bool:
    """Return whether copies of some bytes take longer than a call for one tensor."""
    return copied_bytes >= _numbers(device).copied_bytes


def most_copied(itemsize: int, device: torch.device) -> int:
    """Return how many elements of some bytes are copied together at most."""
    return _numbers(device).run_bytes // itemsize


def over(
    function: Elementwise,
    columns: Sequence[Sequence[Tensor]],
    *numbers: float,
    into: Mapping[int, int] = MappingProxyType({}),
    **options: Any,
) -> None:
    """Call a function on many tensors, in few launches.

    Small tensors are copied into flat ones and back, which is one launch for many of them. Large ones, for which copies
    would take longer than launches, have a call each.

    Args:
        function: takes as many flat tensors as there are columns, then the numbers and options.
        columns: for each argument, a list of tensors. Tensors at one position have equal shapes.
        numbers: of the function.
        into: columns that are only read, with one that is only written, adjacent in memory, and takes their copies.
        options: of the function.
    """
    if not columns[0]:
        return
    at_most = _numbers(columns[0][0].device)
    flats = [adjacent(column) for column in columns]
    kinds = [[(tensor.dtype, tensor.device) for tensor in column] for column in columns]
    copied = [c for c, flat in enumerate(flats) if flat is None]
    weight = [2 * ((c in function.reads) + (c in function.writes)) for c in range(len(columns))]
    first, begin = 0, 0  # of the tensors that are waiting, and of their elements
    end = 0

    def together(last: int) -> None:
        if first < last:
            parts = [column[first:last] for column in columns]
            own = [None if flat is None else flat[begin:end] for flat in flats]
            _gathered(function, parts, own, into, *numbers, **options)

    for i, row in enumerate(zip(*columns, strict=True)):
        size = row[0].numel()
        copies = sum(row[c].dtype.itemsize for c in copied if c not in into)
        alone = any(not row[c].is_contiguous() for c in copied) or (
            sum(weight[c] * row[c].dtype.itemsize for c in copied) * size >= at_most.copied_bytes
        )
        differs = any(kind[i] != kind[first] for kind in kinds)
        if alone or (first < i and (differs or (end - begin + size) * copies > at_most.run_bytes)):
            together(i)
            first, begin = i, end
        end += size
        if alone:
            _alone(function, row, *numbers, **options)
            first, begin = i + 1, end
    together(len(columns[0]))


def _alone(function: Elementwise, row: Sequence[Tensor], *numbers: float, **options: Any) -> None:
    """Call a function on one tensor of each column, where they lie if they are rows, with gaps between them or none."""
    tensors = [tensor.detach() for tensor in row]
    if tensors[0].ndim > 1 and tensors[0].mT.is_contiguous():
        tensors = [tensor.mT for tensor in tensors]
    if rows := _in_rows(tensors):
        function(*rows, *numbers, **options)
        return
    flats = [tensor.contiguous().view(-1) for tensor in tensors]
    function(*flats, *numbers, **options)
    for c in function.writes:
        if not tensors[c].is_contiguous():
            tensors[c].copy_(flats[c].view(tensors[c].shape))


def _in_rows(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """View tensors of one shape as ``(R, n)``, if some have gaps, and no row has any."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return None
    shape = tensors[0].shape
    for dim in range(1, len(shape)):
        with contextlib.suppress(RuntimeError):  # of tensors that cannot be viewed so
            rows = [tensor.view(shape[:dim].numel(), shape[dim:].numel()) for tensor in tensors]
            if all(tensor.stride(1) == 1 for tensor in rows):
                return rows
    return None


def _gathered(
    function: Elementwise,
    columns: Sequence[Sequence[Tensor]],
    flats: Sequence[Tensor | None],
    into: Mapping[int, int],
    *numbers: float,
    **options: Any,
) -> None:
    """Call a function once on contiguous tensors of one dtype a column, some of which lie in flat tensors already."""
    sizes = [tensor.numel() for tensor in columns[0]]
    arguments: list[Tensor] = []
    written: list[tuple[list[Tensor], list[Tensor]]] = []
    for c, (column, flat) in enumerate(zip(columns, flats, strict=True)):
        if flat is None and len(column) == 1:
            flat = column[0].detach().view(-1)
        elif flat is None:
            flat = flats[into[c]] if c in into else None
            if flat is None:
                flat = torch.empty(sum(sizes), dtype=column[0].dtype, device=column[0].device)
            tensors, parts = [tensor.detach().view(-1) for tensor in column], list(torch.split(flat, sizes))
            if c in function.reads:
                torch._foreach_copy_(parts, tensors)
            if c in function.writes:
                written.append((tensors, parts))
        arguments.append(flat)
    function(*arguments, *numbers, **options)
    for targets, copies in written:
        torch._foreach_copy_(targets, copies)


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the flat tensor that consists of these one after the other, if they lie so in memory, as a view."""
    if not tensors or adjacent_runs(tensors)[-1] or not tensors[-1].is_contiguous():
        return None
    first = tensors[0].detach()
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,), first.storage_offset())


def adjacent_runs(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the number of its run, in which tensors lie one after the other in memory."""
    runs: list[int] = []
    last: tuple[Any, Any] | None = None
    run = end = -1
    for tensor in tensors:
        storage, offset = (storage_id(tensor), tensor.dtype), int(tensor.storage_offset())
        if offset != end or storage != last:
            run += 1
        runs.append(run)
        end, last = (offset + tensor.numel() if tensor.is_contiguous() else -1), storage
    return runs


def shaped_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor, one after the other, in the shapes of some tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class PaddedRows(NamedTuple):
    """Tensors whose rows are copied into a flat one, each filled with zeros up to a multiple of some elements.

    Attributes:
        tensors: ``(..., n)``, of one dtype.
        widths: of a row in the flat tensor, for each of them.
    """

    tensors: list[Tensor]
    widths: list[int]

    @property
    def has_padding(self) -> bool:
        """Whether any row is filled up."""
        return any(width != tensor.shape[-1] for tensor, width in zip(self.tensors, self.widths, strict=True))

    def gathered(self, into: Tensor | None = None) -> Tensor:
        """Return the flat tensor; a view if there is one tensor, and nothing is filled up."""
        first = self.tensors[0]
        if into is None and len(self.tensors) == 1 and not self.has_padding and first.is_contiguous():
            return first.view(-1)
        if into is None:
            numel = sum(self._sizes())
            new = torch.zeros if self.has_padding else torch.empty
            into = new(numel, dtype=first.dtype, device=first.device)
        torch._foreach_copy_(self._parts(into), self._sources())
        return into

    def scatter(self, flat: Tensor) -> None:
        """Copy the rows back, unless they are a view."""
        if storage_id(flat) != storage_id(self.tensors[0]):
            torch._foreach_copy_(self._sources(), self._parts(flat))

    def _sizes(self) -> list[int]:
        return [
            tensor.numel() // max(1, tensor.shape[-1]) * width
            for tensor, width in zip(self.tensors, self.widths, strict=True)
        ]

    def _sources(self) -> list[Tensor]:
        return [
            tensor.view(-1) if width == tensor.shape[-1] and tensor.is_contiguous() else tensor
            for tensor, width in zip(self.tensors, self.widths, strict=True)
        ]

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = []
        for part, tensor, width in zip(torch.split(flat, self._sizes()), self.tensors, self.widths, strict=True):
            n = tensor.shape[-1]
            rows = part.view(*tensor.shape[:-1], width)[..., :n]
            parts.append(rows.view(-1) if width == n and tensor.is_contiguous() else rows)
        return parts


def padded_rows(tensors: Sequence[Tensor], multiple: int) -> PaddedRows:
    """Return tensors with rows that are to be filled up to a multiple of some elements."""
    return PaddedRows(list(tensors), [-(-tensor.shape[-1] // multiple) * multiple for tensor in tensors])
