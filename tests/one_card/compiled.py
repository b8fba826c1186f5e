"""Compiled functions compared with plain ones in steps of small parameters, call by call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_shared import bits, entry, name_of
from benchmarks.measure import attempt
from hf_muon import Muon
from hf_muon.math.elementwise import Elementwise
from hf_muon.math.momentum import BUFFER, move_
from tests.support.accelerated import accelerated

Case = tuple[torch.dtype, torch.dtype, dict[str, Any]]
"""Dtypes of weights and gradients, and options."""


class Twins:
    """Repeats each call of a compiled function in the `with` block uncompiled, and compares what both write.

    Attributes:
        found: by function, dtypes and options: calls, elements, elements that differ, and the largest difference in
            units in the last place.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str], list[int]] = {}

    def __enter__(self) -> Twins:
        self._call = call = Elementwise.__call__

        def both(function: Elementwise, *arguments: Tensor | float, **options: Any) -> None:
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            copies: dict[Any, Tensor] = {}
            for tensor in tensors:
                copies.setdefault(_place(tensor), tensor.clone())
            call(function, *arguments, **options)
            twins = [copies[_place(tensor)] for tensor in tensors]
            function.plain(*twins, *arguments[len(tensors) :], **options)
            self._compare(function, tensors, twins, options)

        Elementwise.__call__ = both  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Elementwise.__call__ = self._call  # type: ignore[method-assign]

    def _compare(self, function: Elementwise, tensors: Any, twins: Any, options: Mapping[str, Any]) -> None:
        dtypes = ", ".join(name_of(tensor.dtype) for tensor in tensors)
        words = ", ".join(f"{key}={value}" for key, value in options.items())
        counts = self.found.setdefault((function.name, dtypes, words), [0, 0, 0, 0])
        counts[0] += 1
        for k in function.writes:
            mine, other = _ordered(tensors[k]), _ordered(twins[k])
            counts[1] += mine.numel()
            counts[2] += int((mine != other).sum())
            counts[3] = max(counts[3], int((mine - other).abs().max())) if mine.numel() else counts[3]


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _ordered(tensor: Tensor) -> Tensor:
    """Return integers in the order of the numbers, so that a difference is one in units in the last place."""
    own = bits(tensor)
    least = torch.iinfo(own.dtype).min
    return own.long() if not tensor.is_floating_point() else torch.where(own < 0, least - own.long(), own.long())


class _Said(logging.Handler):
    """Collects what the package logs about compilation, each line once."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}
        logger = logging.getLogger("hf_muon")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "compil" in text:
            self.lines[f"- logged: {entry(text)}"] = None


def cases_of() -> Iterator[Case]:
    """Yield dtypes of weights and gradients, and options, in which steps call compiled functions."""
    for dtype in (torch.float32, torch.bfloat16):
        yield dtype, dtype, {}
        for stored in ("bf16", "int8"):
            yield dtype, dtype, {"momentum_dtype": stored, "adamw_state_dtype": stored}
    yield torch.bfloat16, torch.float32, {}
    for dtype in (torch.bfloat16, torch.float16):
        yield dtype, dtype, {"weight_rounding": "nearest", "nesterov": False}
        int8 = {"momentum_dtype": "int8", "adamw_state_dtype": "int8"}
        yield dtype, dtype, {"weight_rounding": "nearest", "nesterov": False, **int8}


def of_case(kind: str, case: Case) -> tuple[dict[tuple[str, str, str], list[int]], list[str], str]:
    """Return what differs in a case, what was logged about compiling, and why it does not run."""
    said, device = _Said(), torch.device(kind)
    with contextlib.nullcontext() if kind == "cuda" else accelerated(), Twins() as twins:
        dtype, of_grads, options = case
        note = attempt(lambda: take(*small(device, dtype, options, of_grads), times=3))
        if not options:
            note = note or attempt(lambda: _move_alone(device, dtype, of_grads))
    return twins.found, list(said.lines), note


def small(
    device: torch.device, dtype: torch.dtype, options: dict[str, Any], of_grads: torch.dtype | None = None
) -> tuple[Callable[[], None], Muon]:
    """Return a function that gives gradients to small parameters of several shapes, and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    of_grads = of_grads or dtype

    def numbers(shape: tuple[int, ...], to: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, to)

    matrices = [nn.Parameter(numbers(s, dtype)) for s in ((48, 128), (48, 128), (130, 64), (33, 70), (3, 20, 40))]
    others = [nn.Parameter(numbers(s, dtype)) for s in ((130, 64), (96,), (77, 65), (1,), (512, 256))]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    optimizer = Muon(groups, lr=1e-2, weight_decay=0.1, **options)

    def give() -> None:
        for param in (*matrices, *others):
            if of_grads is not dtype:
                param.grad_dtype = of_grads
            param.grad = numbers(tuple(param.shape), of_grads)

    return give, optimizer


def take(give: Callable[[], None], optimizer: Muon, times: int) -> None:
    for _ in range(times):
        give()
        optimizer.step()


def _move_alone(device: torch.device, dtype: torch.dtype, of_grads: torch.dtype) -> None:
    """Move momentum without returning the update, as DDP does on ranks that do not own a matrix."""
    shape = (48, 128)
    grads = [torch.randn(shape, device=device, dtype=of_grads)]
    for stored in dict.fromkeys((torch.promote_types(dtype, torch.float32), torch.bfloat16)):
        moments = [{BUFFER: torch.zeros(shape, device=device, dtype=stored)}]
        for step in range(3):
            move_(moments, grads, momentum=0.95, nesterov=True, step=step, wanted=False)
