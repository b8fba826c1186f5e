"""Run the kernels that Inductor writes for CUDA in Triton's interpreter, on a CPU, beside the plain functions.

    python -m tests.cuda.interpreter < CALLS     with TRITON_INTERPRET=1; a line for each difference

The interpreter computes with NumPy, and rounds each operation once. So it shows that formulas, casts, masks, hashes and
positions are right; `tests/cuda/test_kernels.py` shows that a card rounds each operation once, too. CALLS are pickled.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.cuda import fake_gpu
from tests.cuda.compilation import loaded, write
from tests.cuda.fake_step import CUDA, Call, functions

SUMS = {"sum_squares", "invert"}
"""Functions that sum rows, for which kernels have an order of their own."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS, _BLOCKS = 1501, 11  # of several blocks of a kernel, the last of which is not full


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    calls: list[Call] = pickle.load(sys.stdin.buffer)
    with fake_gpu.card(90), nearest_bf16():
        for call in calls:
            for line in differences(call):
                print(f"{call}: {line}", flush=True)


def differences(call: Call) -> Iterator[str]:
    """Yield what differs between the kernel of a call and the plain function, and what depends on a place."""
    function, options = functions()[call.function], dict(call.options)
    size = _BLOCKS if call.in_blocks else _ELEMENTS
    kernel = interpreted(call, size)
    arguments = values(call, size)
    plain, own = _copies(call, arguments), _copies(call, arguments)
    reversed_ = _copies(call, [tensor.flip(0) if tensor.ndim else tensor for tensor in arguments])
    with nearest_roots():
        function.plain(*plain, **options)
    kernel(own)
    kernel(reversed_)
    for place in function.writes:
        wrong = _bits(plain[place]) != _bits(own[place])
        if call.function in SUMS:
            wrong = ~torch.isclose(own[place], plain[place], rtol=4 * torch.finfo(own[place].dtype).eps, atol=0)
        if wrong.any():
            apart = (plain[place].double() - own[place].double()).abs().max().item()
            yield f"argument {place} differs in {int(wrong.sum())} of {wrong.numel()} elements, by at most {apart:.3g}"
        if not torch.equal(_bits(reversed_[place].flip(0)), _bits(own[place])):
            yield f"argument {place} depends on where elements lie"


def values(call: Call, size: int) -> list[Tensor]:
    """Return arguments with values of many magnitudes, as in a step."""
    generator = torch.Generator().manual_seed(0)
    made: list[Tensor] = []
    for place, argument in enumerate(call.arguments):
        dtype, shape = argument.dtype, call.shape_of(argument, size)
        if argument.place < place:
            made.append(made[argument.place])
        elif not argument.ndim:
            value = {torch.bool: True, torch.int32: -1234567891}.get(dtype, 0.05 + 0.1 * (place % 3))
            made.append(torch.tensor(value, dtype=dtype))
        elif not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            made.append(torch.randint(max(-127, limits.min), limits.max + 1, shape, generator=generator).to(dtype))
        else:
            own = torch.randn(shape, generator=generator, dtype=torch.float64)
            own *= 10.0 ** torch.randint(-4, 1, shape, generator=generator)
            is_scale = call.in_rows and argument.ndim == 1
            is_square = dtype is torch.float64 or (call.function.startswith("step") and place == 3)
            made.append((own.abs() if is_scale or is_square else own).to(dtype))
    return made


def interpreted(call: Call, size: int) -> Callable[[Sequence[Tensor]], None]:
    """Return what runs the kernel of a call on CPU tensors; see `Call.tensors`."""
    written, fakes = write(call, size, CUDA)
    source = written.modules[-1].partition("def get_args()")[0]
    replaced = {
        "async_compile = AsyncCompile()": "",
        "del async_compile": "",
        "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "",
        "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda": "",
        "empty_strided_cuda(": "empty_strided_cpu(",
        "torch.cuda._DeviceGuard(0)": "contextlib.nullcontext()",
        "torch.cuda.set_device(0)": "pass",
    }
    for old, new in replaced.items():
        source = source.replace(old, new)
    names = {"async_compile": _Interpreter(), "contextlib": contextlib, "get_raw_stream": lambda index: 0}
    exec(compile(source, "wrapper", "exec"), names)  # what Inductor does with it
    storages = [fake.untyped_storage()._cdata for fake in fakes]
    places = [
        storages.index(argument.untyped_storage()._cdata) if torch.is_tensor(argument) else None
        for argument in written.arguments
    ]

    def run(tensors: Sequence[Tensor]) -> None:
        """Call it with tensors for fake ones, and with the sizes of the fake ones."""
        names["call"](
            [
                int(argument) if place is None else tensors[place]
                for place, argument in zip(places, written.arguments, strict=True)
            ]
        )

    return run


# The interpreter has no libdevice. The rest of these functions is exact, too.
_LIBDEVICE = """
@triton.jit
def _isnan(x):
    return x != x


@triton.jit
def _rint(x):  # ties to even: adding and subtracting 1.5 * 2**23 is exact below 2**22
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _copysign(x, y):
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return ((x.to(tl.int32, bitcast=True) & 2147483647) | sign).to(tl.float32, bitcast=True)


"""


class _Interpreter:
    """Stands for Inductor's `async_compile`: kernels run in Triton's interpreter."""

    def wait(self, scope: object) -> None:
        pass

    def triton(self, name: str, source: str, device_str: str) -> SimpleNamespace:
        source = source.replace("libdevice.floor", "tl.floor").replace("libdevice.nearbyint", "_rint")
        source = source.replace("libdevice.sqrt", "tl.sqrt")  # of fp64
        # By a function that the interpreter does not know it reduces one element at a time, which takes a minute.
        source = source.replace("triton_helpers.max2(", "tl.max(")
        for own in ("isnan", "rint", "copysign"):
            source = source.replace(f"libdevice.{own}(", f"_{own}(")
        kernel = loaded(name, source.replace("@triton_heuristics", f"{_LIBDEVICE}@triton_heuristics", 1))
        config = kernel.configs[0]

        def run(*arguments: Any, stream: object = None) -> None:
            reduces = any(key.startswith("R0_") for key in kernel.fn.arg_names)
            elements = arguments[-2] if reduces else arguments[-1]
            numbers = [int(value) if isinstance(value, bool) else value for value in arguments]
            kernel.fn[(-(-elements // config.kwargs["XBLOCK"]),)](*numbers, **config.kwargs)

        return SimpleNamespace(run=run)


@contextlib.contextmanager
def nearest_roots() -> Iterator[None]:
    """Have torch's square roots be the nearest numbers, as a card's are; on a CPU they may be one unit away."""
    sqrt = Tensor.sqrt

    def nearest(tensor: Tensor) -> Tensor:
        return sqrt(tensor.double()).to(tensor.dtype)

    with (
        mock.patch.object(Tensor, "sqrt", nearest),
        mock.patch.object(Tensor, "sqrt_", lambda tensor: tensor.copy_(nearest(tensor))),
    ):
        yield


@contextlib.contextmanager
def nearest_bf16() -> Iterator[None]:
    """Have the interpreter treat bf16 as a card does: it cuts bits off, and multiplies them as integers."""
    import triton.runtime.interpreter as interpreter

    convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
    dot = builder.create_dot

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.primitive_bitwidth < source.primitive_bitwidth and str(target) == "bf16":
            bits = torch.from_numpy(data.astype("float32")).bfloat16().view(torch.int16)
            return bits.numpy().view("uint16")
        return convert(data, source, target, rounding)

    def multiplied(self: Any, a: Any, b: Any, *others: Any) -> Any:
        factors = [
            interpreter.TensorHandle((each.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)
            if str(each.dtype) == "bf16"
            else each
            for each in (a, b)
        ]
        return dot(self, *factors, *others)

    with (
        mock.patch.object(interpreter, "_convert_float", converted),
        mock.patch.object(builder, "create_dot", multiplied),
    ):
        yield


def _copies(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    copies: list[Tensor] = []
    for place, (argument, tensor) in enumerate(zip(call.arguments, tensors, strict=True)):
        if argument.place < place:
            copies.append(copies[argument.place])
        elif argument.contiguous:
            copies.append(tensor.clone(memory_format=torch.contiguous_format))
        else:
            copies.append(tensor.repeat_interleave(2, dim=-1)[..., : tensor.shape[-1]].copy_(tensor))
    return copies


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


if __name__ == "__main__":
    main()
