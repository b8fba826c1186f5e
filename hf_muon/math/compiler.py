"""Compile elementwise functions on accelerators, if a trial before the first step succeeds.

Compiled functions are bit-identical to uncompiled ones: each operation is rounded once, as `torch` rounds it. So where
the compiler fails in the middle of a step, on this rank only, the rank takes the rest of it uncompiled. An error of a
compiled function is an error of the step.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from hf_muon.math.torch_private import inductor_options, is_watched, lacking

# By type of device: the package that torch needs to compile for it.
_COMPILERS = {"cuda": "triton", "xpu": "triton"}
_TURNED_OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
# Options of Inductor with which each operation is rounded once, under their names in different versions of torch.
_OPTIONS: dict[tuple[str, ...], bool] = {
    # Timings would choose between kernels that round differently.
    ("triton.autotune_pointwise",): False,
    # The same for kernels that reduce rows.
    ("deterministic", "test_configs.force_filter_reduction_configs"): True,
    # No product and sum are contracted to one operation.
    ("emulate_precision_casts",): True,
    # Quotients are rounded to the nearest number.
    ("eager_numerics.division_rounding", "emulate_divison_rounding"): True,
}
_BACKEND = "inductor"
# Elements that a kernel may load at once.
_WIDE = 16
# Functions are compiled with tensors of so many elements that torch writes the kernel for large ones.
_SIZE, _ROWS, _WIDTH = 2**17, 2048, 1024


_tried: set[torch.device] = set()
_why_off = ""
_is_reported = False
_functions: dict[Any, Callable[..., None]] = {}


def is_compiled(device: torch.device) -> bool:
    """Return whether functions are compiled on a device."""
    return not _why_off and device in _tried and not is_watched()


def why_off() -> str:
    """Return why functions are compiled on no device of this process; an empty text if they are, or could be."""
    return _why_off


def turn_off(reason: str) -> None:
    """Compile no functions from now on."""
    global _why_off
    _why_off = _why_off or reason


def is_news() -> bool:
    """Return whether compiling is off and nobody has asked since."""
    global _is_reported
    was_reported, _is_reported = _is_reported, bool(_why_off)
    return bool(_why_off) and not was_reported


def untried(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return the devices for which it is not yet known whether functions can be compiled there."""
    new = [device for device in devices if device.type in _COMPILERS and device not in _tried]
    return [] if _why_off or not new or is_watched() else new


def try_on(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Compile and run a small function on a device, which takes some seconds, and turn compiling off if that fails.

    Args:
        device: one that has not been tried.
        dtypes: those that functions read and write there.
    """
    if reason := _why_not(device, dtypes):
        turn_off(reason)
    else:
        _tried.add(device)


def call(
    function: Callable[..., None], tensors: Sequence[Tensor], options: Mapping[str, Any], row: int | None = None
) -> bool:
    """Call a compiled function, and return true; or turn compiling off if that fails, and return false.

    Args:
        function: writes into tensors. Its code is compiled once for each kind of arguments.
        tensors: flat tensors of equal sizes, rows ``(R, n)`` and ``(R,)``, or stacks of rows ``(B, R, n)`` and
            ``(B, R)``, with gaps after the second dim or none; and numbers of no dims.
        options: options of the function.
        row: length of all rows; None for any.
    """
    # torch distinguishes views from other tensors, and would compile again for them.
    detached = {id(tensor): tensor.detach() for tensor in tensors}
    tensors = [detached[id(tensor)] for tensor in tensors]
    # Which arguments are the same tensor is part of the key: a kernel may read what it writes.
    order = {id(tensor): k for k, tensor in reversed([*enumerate(tensors)])}
    kinds = ((t.dtype, t.ndim, t.is_contiguous(), t.device, order[id(t)]) for t in tensors)
    divides = tensors[0].numel() % _WIDE == 0
    key = (function, divides, *kinds, *options.items())
    if key not in _functions:
        compiled = _compile(function, divides=divides)
        try:
            # With tensors of one size, so that the kernel depends on no tensor's.
            compiled(*_like(tensors, row or _WIDTH), **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  compilers raise anything
            turn_off(_reason(error))
            return False
        _functions[key] = compiled
    _functions[key](*tensors, **options)
    return True


def _compile(function: Callable[..., None], *, divides: bool) -> Callable[..., None]:
    """Compile a function again. If `divides` is set, a kernel can load 16 elements at once, up to the end."""

    def traced(*tensors: Tensor, **options: Any) -> None:
        if divides:
            torch._check(tensors[0].numel() % _WIDE == 0)  # type: ignore[no-untyped-call]
        function(*tensors, **options)

    # A copy of its code, since torch limits how often one is compiled.
    copy = FunctionType(traced.__code__.replace(), traced.__globals__, closure=traced.__closure__)
    options = _inductor_options() if _BACKEND == "inductor" else None
    return torch.compile(copy, dynamic=True, fullgraph=True, backend=_BACKEND, options=options)


def _like(tensors: Sequence[Tensor], width: int) -> list[Tensor]:
    """Return zeros in a size that depends on none of the tensors; but 16 divides it where it divides theirs."""
    # No two lengths or strides are alike, since torch takes equal ones for one number.
    flat = _SIZE + (tensors[0].numel() % _WIDE > 0)
    shape = {1: (flat,), 2: (_ROWS, width), 3: (40, 56, width)}[max(tensor.ndim for tensor in tensors)]

    def zeros(k: int, tensor: Tensor) -> Tensor:
        sizes = shape[: tensor.ndim]
        if tensor.is_contiguous():
            return tensor.new_zeros(sizes)
        return tensor.new_zeros((sizes[0], sizes[1] + _WIDE + k, *sizes[2:]))[:, : sizes[1]].detach()

    zeros_of = {id(tensor): zeros(k, tensor) for k, tensor in enumerate(tensors) if tensor.ndim}
    return [zeros_of.get(id(tensor), tensor) for tensor in tensors]


def _inductor_options() -> dict[str, Any]:
    """Return the options by which each operation is rounded once.

    Raises:
        RuntimeError: this version of torch lacks one.
    """
    available = set(inductor_options())
    chosen: dict[str, Any] = {}
    for names, value in _OPTIONS.items():
        name = next((name for name in names if name in available), None)
        if name is None:
            raise lacking(f"option {names[0]} of torch.compile", "compiled functions")
        chosen[name] = value
    return chosen


def _why_not(device: torch.device, dtypes: Iterable[torch.dtype]) -> str:
    """Return why functions cannot be compiled on a device, or an empty text."""
    if switch := next((name for name in _TURNED_OFF if os.environ.get(name) == "1"), None):
        return f"{switch}=1 is set"
    package = _COMPILERS[device.type]
    if importlib.util.find_spec(package) is None:
        return f"there is no {package} for {device.type}"
    synchronize = torch.get_device_module(device).synchronize
    # An error of an earlier kernel is raised here: it is not the compiler's.
    synchronize()
    try:
        tensors = [torch.zeros(_SIZE, dtype=dtype, device=device) for dtype in dict.fromkeys(dtypes)]
        _compile(_trial, divides=True)(*tensors)
        synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  compilers raise anything
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    # The second line of torch's errors has the compiler's.
    first_lines = str(error).strip().splitlines()[:2]
    return f"{type(error).__name__}: {' '.join(first_lines)[:200]}"


def _trial(*tensors: Tensor) -> None:
    """Compute what functions compute: products, sums, roots, quotients, conversions."""
    for tensor in tensors:
        exact = tensor.float() * 0.5 + 1
        tensor.copy_(exact / (exact * exact).sqrt())
