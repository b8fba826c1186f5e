"""Elementwise functions, many tensors at once: compiled into one kernel where torch can, in chunks elsewhere.

All devices run the same source, and each operation is rounded once, so compiled functions are bit-identical to
uncompiled ones. Functions take flat tensors, so that one compilation serves every shape, and write into their
arguments. The result of an element does not depend on its position, so every layout is bit-identical to a single
process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hf_muon.math import compiler


class _Numbers(NamedTuple):
    """Sizes that suit a kind of device.

    Attributes:
        copied_bytes: copying so many bytes takes as long as several calls.
        run_bytes: bound on the copies of small tensors that are worked on at once.
        chunk: elements that a function which is not compiled works on at once, because of its temporary tensors.
    """

    copied_bytes: int
    run_bytes: int
    chunk: int


Number = float | Tensor
"""An argument of an `Elementwise` other than a flat tensor; a 0-dim tensor where it is compiled."""

# Not measured on MPS.
_HOSTS = {"cpu", "mps"}
# An accelerator copies 56 MiB in 20 us at 3 TB/s, as long as several launches take. On a CPU calls cost less, and a
# chunk of fp32 stays in a core's cache.
_ON_HOST = _Numbers(copied_bytes=2**18, run_bytes=2**20, chunk=2**17)
_ON_ACCELERATOR = _Numbers(copied_bytes=56 * 2**20, run_bytes=224 * 2**20, chunk=2**22)
# Inductor compiles for addresses that are multiples of 16 bytes, so that a kernel can load so many at once.
_ALIGNED_BYTES = 16


def is_accelerator(device: torch.device) -> bool:
    """Return whether launches cost more than memory here; also on the meta device, so that they can be counted."""
    return device.type not in _HOSTS


def _numbers(device: torch.device) -> _Numbers:
    return _ON_ACCELERATOR if is_accelerator(device) else _ON_HOST


def chunk_size(device: torch.device) -> int:
    """Return how many elements to work on at once on a device where functions are not compiled."""
    return _numbers(device).chunk


def rows_per_chunk(tensor: Tensor) -> int:
    """Return how many indices of a tensor's first dim, at least one, make a chunk."""
    return max(1, chunk_size(tensor.device) // max(1, tensor.shape[1:].numel()))


def most_elements(max_bytes: int) -> int:
    """Return how many elements, with fp32 results that `over` writes and copies of them, take at most some bytes."""
    return max(max_bytes // 8, (max_bytes - _ON_ACCELERATOR.run_bytes) // 4)


def as_tensor(argument: Tensor | float) -> Tensor:
    """Return an argument as a tensor, because the compiler would compile again for each Python number."""
    if isinstance(argument, Tensor):
        return argument
    # fp64 keeps a number's digits, and without dims it widens no fp32 tensor, like a Python number. Ints are salts.
    dtype = torch.int32 if isinstance(argument, int) else torch.float64
    return torch.tensor(argument, dtype=dtype, device="cpu")


class Elementwise:
    """A function of flat tensors that writes into some of them: compiled where torch can, otherwise in chunks.

    Args:
        function: takes flat tensors, or rows ``(R, n)`` and numbers of rows ``(R,)``; numbers; and options, each
            combination of which is compiled. It reduces only along rows, and uses only operators that round once. It
            first converts what it only reads to the dtype of what it only writes: `over` may copy it into that memory.
        reads: positions of the tensors that it reads.
        writes: positions of the tensors that it writes.
        row: the only length of its rows; None for any.
        by_row: positions of the tensors that have a number for each of these rows.
        name: for those who count calls; by default that of the function.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *,
        reads: Sequence[int],
        writes: Sequence[int],
        row: int | None = None,
        by_row: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self.plain = function
        self.row = row
        self.by_row = by_row
        self.name = name or cast(FunctionType, function).__name__.strip("_")
        self.reads = reads
        self.writes = writes
        # Memory for copies of what is only read: that of a position that is only written.
        only_read = [position for position in reads if position not in {*writes, *by_row}]
        self.scratch_of = dict(zip(only_read, (position for position in writes if position not in reads), strict=False))

    def __call__(self, first: Tensor, *arguments: Tensor | float, **options: Any) -> None:
        """Call the function. On the meta device, call one operator instead."""
        if first.device.type == "meta":
            first.copy_(first)
        elif not first.numel():
            pass
        elif not self._call_compiled(first, *arguments, **options):
            # Tensors that are passed twice stay the same one: a function may read one that it writes.
            tensors = [first, *(argument for argument in arguments if isinstance(argument, Tensor))]
            rows = rows_per_chunk(first)
            chunks = {id(tensor): torch.split(tensor, rows) for tensor in tensors}
            for chunk in zip(*(chunks[id(tensor)] for tensor in tensors), strict=True):
                self.plain(*chunk, *arguments[len(tensors) - 1 :], **options)

    def _call_compiled(self, first: Tensor, *arguments: Tensor | float, **options: Any) -> bool:
        """Call the compiled function, and return true, if functions are compiled on the device of the tensors."""
        if not compiler.is_compiled(first.device):
            return False
        tensors = list(map(as_tensor, (first, *arguments)))
        # Inductor copies tensors that are not aligned, and what early versions then write stays in the copies.
        odd = {id(tensor): tensor.clone() for tensor in tensors if tensor.ndim and tensor.data_ptr() % _ALIGNED_BYTES}
        if not compiler.call(self.plain, [odd.get(id(tensor), tensor) for tensor in tensors], options, self.row):
            return False
        for tensor in (tensors[k] for k in self.writes):
            if id(tensor) in odd:
                tensor.copy_(odd[id(tensor)])
        return True

    def in_blocks(self, position: int, tensor: Tensor) -> Tensor:
        """View a tensor as the function takes it: ``(..., row)``, or a number for each row."""
        if self.row is None:
            return tensor
        shape = tensor.shape[:-1] if tensor.ndim > 1 else ()
        return tensor.view(*shape, -1) if position in self.by_row else tensor.view(*shape, -1, self.row)


def over(function: Elementwise, columns: Sequence[Sequence[Tensor]], *numbers: float, **options: Any) -> None:
    """Call a function on many tensors, in few launches.

    Small tensors are copied into flat ones and back, which is one launch for many of them. Large ones, for which copies
    would take longer than launches, have a call each. In a call for several tensors, the argument for a column is:

    ==========  =====  ========  =====================================================================================
    Adjacent    Read   Written   Argument
    ==========  =====  ========  =====================================================================================
    yes         any    any       a view of the memory in which its tensors lie one after the other
    no          yes    no        a copy: in the argument of a column that is only written (`scratch_of`), or else new
    no          no     yes       new memory, copied back after the call
    no          yes    yes       a copy in new memory, copied back after the call
    ==========  =====  ========  =====================================================================================

    Args:
        function: takes as many flat tensors as there are columns, then the numbers and options.
        columns: for each argument, a list of tensors. Tensors at one position have equal shapes, but for those with
            a number for each row, ``(..., n / row)`` for ``(..., n)``.
        numbers: further arguments of the function.
        options: its options.
    """
    if not columns[0]:
        return
    at_most = _numbers(columns[0][0].device)
    flats = [adjacent(column) for column in columns]
    copied = [c for c, flat in enumerate(flats) if flat is None]
    counted = [c for c in copied if c not in function.by_row]
    # Passes over a column's bytes: a copy in reads and writes each of them, and so does a copy back.
    passes = [2 * ((c in function.reads) + (c in function.writes)) for c in range(len(columns))]
    most_bytes = at_most.run_bytes
    # Copies of 8-bit codes are a quarter of updates, which take memory in any case.
    if function.row is not None:
        most_bytes = max(most_bytes, sum(flat.nbytes for flat in flats if flat is not None) // 4)
    # Small tensors that wait for more, to be copied together.
    waiting: list[Sequence[Tensor]] = []
    waiting_bytes, kind = 0, None
    for row in zip(*columns, strict=True):
        last_kind, kind = kind, [(tensor.dtype, tensor.device) for tensor in row]
        if kind != last_kind:
            copy_bytes = sum(row[c].dtype.itemsize for c in counted if c not in function.scratch_of)
            pass_bytes = sum(row[c].dtype.itemsize * passes[c] for c in counted)
        size = row[0].numel()
        alone = size * pass_bytes >= at_most.copied_bytes or any(not row[c].is_contiguous() for c in copied)
        if waiting and (alone or kind != last_kind or waiting_bytes + size * copy_bytes > most_bytes):
            _call_packed(function, waiting, flats, *numbers, **options)
            waiting, waiting_bytes = [], 0
        if alone:
            _call_alone(function, row, *numbers, **options)
        else:
            waiting.append(row)
            waiting_bytes += size * copy_bytes
    if waiting:
        _call_packed(function, waiting, flats, *numbers, **options)


def _call_alone(function: Elementwise, row: Sequence[Tensor], *numbers: float, **options: Any) -> None:
    """Call a function on one tensor of each column, in place if all can be viewed as rows, with gaps or none."""
    tensors = [tensor.detach() for tensor in row]
    # A weight that is stored transposed is contiguous the other way round.
    if function.row is None and tensors[0].ndim > 1 and tensors[0].mT.is_contiguous():
        tensors = [tensor.mT for tensor in tensors]
    rows = _in_rows(tensors)
    if rows is not None:
        function(*(function.in_blocks(c, tensor) for c, tensor in enumerate(rows)), *numbers, **options)
        return
    copies = [tensor.contiguous() for tensor in tensors]
    _call_packed(function, [copies], [None] * len(copies), *numbers, **options)
    for c in function.writes:
        if copies[c] is not tensors[c]:
            tensors[c].copy_(copies[c])


def _in_rows(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """View tensors of one shape as ``(R, n)``, if some have gaps, and no row has any."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return None
    shape = tensors[0].shape
    for dim in range(1, len(shape)):
        # Raised where a tensor has no such view.
        with contextlib.suppress(RuntimeError):
            rows = [tensor.view(shape[:dim].numel(), tensor.shape[dim:].numel()) for tensor in tensors]
            if all(tensor.stride(1) == 1 for tensor in rows):
                return rows
    return None


def _call_packed(
    function: Elementwise,
    rows: Sequence[Sequence[Tensor]],
    flats: Sequence[Tensor | None],
    *numbers: float,
    **options: Any,
) -> None:
    """Call a function once on contiguous tensors of one dtype a column, some of which lie in flat tensors already."""
    columns = [*zip(*rows, strict=True)]
    arguments: dict[int, Tensor] = {}
    written: list[tuple[list[Tensor], list[Tensor]]] = []
    # Those that are copied into the memory of others come last.
    for c in sorted(range(len(columns)), key=function.scratch_of.__contains__):
        column, flat = columns[c], flats[c]
        if flat is not None:
            begin = int(column[0].storage_offset()) - int(flat.storage_offset())
            arguments[c] = flat[begin : begin + sum(tensor.numel() for tensor in column)]
        elif len(column) == 1:
            arguments[c] = column[0].detach().view(-1)
        else:
            tensors = [tensor.detach().view(-1) for tensor in column]
            sizes = [tensor.numel() for tensor in tensors]
            shared = arguments.get(function.scratch_of.get(c, -1))
            if shared is None:
                shared = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
            arguments[c] = shared
            places = list(torch.split(arguments[c], sizes))
            if c in function.reads:
                torch._foreach_copy_(places, tensors)
            if c in function.writes:
                written.append((tensors, places))
    function(*(function.in_blocks(c, arguments[c]) for c in range(len(columns))), *numbers, **options)
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
    storage: Any = None
    dtype: torch.dtype | None = None
    run = end = -1
    for tensor in tensors:
        last, offset = storage, int(tensor.storage_offset())
        # Tensors of the same memory have the same object.
        storage = tensor.untyped_storage()
        if offset != end or storage is not last or tensor.dtype != dtype:
            run += 1
        runs.append(run)
        end, dtype = (offset + tensor.numel() if tensor.is_contiguous() else -1), tensor.dtype
    return runs


def shaped_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor, one after the other, in the shapes of some tensors."""
    slices = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [slice_.view(tensor.shape) for slice_, tensor in zip(slices, tensors, strict=True)]
