"""Elementwise functions: many tensors at once are as one after the other, and compiled is as plain."""

from __future__ import annotations

import itertools
import re
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_muon import Muon
from hf_muon.math import adamw, compiler, elementwise, momentum, newton_schulz, update
from hf_muon.math.elementwise import Elementwise, adjacent, adjacent_runs, number, over, shaped_like
from tests.accelerated import accelerated, compiling

HALVES = [torch.float32, torch.bfloat16, torch.float16]


def _add(target, addend, result, factor):
    result.copy_(target + addend * factor)
    target.copy_(result)


ADD = Elementwise(_add, reads=(0, 1), writes=(0, 2))


def calls_of(function):
    """Record the sizes of the calls of a function."""
    sizes = []
    plain = function.plain
    recorded = Elementwise(lambda *args, **options: sizes.append(args[0].numel()) or plain(*args, **options),
                           reads=function.reads, writes=function.writes)  # fmt: skip
    return recorded, sizes


def columns(dtypes=(torch.float32, torch.float32)):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 3, 2), (7, 1), (0, 3), (4, 4)]
    target, addend = ([torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for dtype in dtypes)
    addend[3] = torch.randn(1, 7, generator=generator).to(dtypes[1]).T
    target[5] = torch.randn(4, 8, generator=generator).to(dtypes[0])[:, ::2]  # has gaps
    flat = torch.empty(sum(tensor.numel() for tensor in target))
    return target, addend, shaped_like(flat, target)


@pytest.mark.parametrize("copied_bytes", [0, 2**30])
@pytest.mark.parametrize("into", [{}, {1: 2}])
def test_many_tensors_are_as_one_after_the_other(copied_bytes, into):
    results = columns()
    expected = columns()
    for row in zip(*expected, strict=True):
        _add(*row, number(0.5))
    function, sizes = calls_of(ADD)
    with accelerated(copied_bytes):
        over(function, results, number(0.5), into=into)
    for one, other in zip(itertools.chain(*results), itertools.chain(*expected), strict=True):
        assert torch.equal(one, other)
    assert sizes == ([12, 5, 12, 7, 16] if not copied_bytes else [36, 16])


def test_tensors_of_several_dtypes_have_calls_of_their_own():
    tensors = [torch.ones(2), torch.ones(3), torch.ones(4, dtype=torch.bfloat16), torch.ones(5)]
    function, sizes = calls_of(Elementwise(lambda tensor: tensor.add_(1), reads=(0,), writes=(0,)))
    over(function, [tensors])
    assert sizes == [5, 4, 5]
    assert all((tensor == 2).all() for tensor in tensors)


def test_a_run_has_bounded_copies(monkeypatch):
    monkeypatch.setattr(elementwise, "_RUN_BYTES", 40)
    function, sizes = calls_of(Elementwise(lambda tensor: tensor.add_(1), reads=(0,), writes=(0,)))
    over(function, [[torch.ones(4) for _ in range(5)]])
    assert sizes == [8, 8, 4]


def test_tensors_that_lie_one_after_the_other_are_a_view():
    flat = torch.arange(10.0)
    parts = [flat[1:4], flat[4:8].view(2, 2), flat[8:]]
    assert adjacent(parts).data_ptr() == flat[1:].data_ptr()
    assert torch.equal(adjacent(parts), flat[1:])
    assert adjacent([parts[1], parts[0]]) is None
    assert adjacent([flat[:2], torch.arange(2.0)]) is None
    assert adjacent([flat[::2]]) is None
    assert adjacent([]) is None
    assert adjacent_runs([*parts, flat[:2], torch.ones(2)]) == [0, 0, 0, 1, 2]


def numbers(*values):
    return [number(value) for value in values]


def cases():
    """Yield every function that is compiled, with arguments of all dtypes."""
    salt = number(-12345, torch.int32)
    generator = torch.Generator().manual_seed(0)

    def values(dtype, count=1001):
        largest = 2 if dtype is torch.float16 else 6
        return (torch.randn(count, generator=generator) * torch.logspace(-6, largest, count)).to(dtype)

    for buffer, grad, nesterov in itertools.product([torch.float32, torch.bfloat16], HALVES, [True, False]):
        arguments = [values(buffer), values(grad), torch.empty(1001), number(0.05), salt]
        yield momentum.MOVE, arguments, {"nesterov": nesterov}
    for nesterov in (True, False):
        gathered = values(torch.float32)  # gradients, where updates will be
        yield momentum.MOVE, [values(torch.float32), gathered, gathered, number(0.05), salt], {"nesterov": nesterov}
        codes = torch.randint(-127, 128, (30, 64), generator=generator, dtype=torch.int8)
        grads = torch.randn(30, 64, generator=generator)
        scales = torch.rand(30, generator=generator)
        yield momentum.MOVE_CODES, [codes, scales, grads, grads, number(0.05)], {"nesterov": nesterov}
    for direction in HALVES:
        yield update.APPLY, [values(torch.float32), values(direction), *numbers(0.99, -0.01)], {}
        for weights, stochastic in itertools.product(HALVES[1:], [True, False]):
            arguments = [values(weights), values(direction), *numbers(0.99, -0.01), salt]
            yield update.APPLY_ROUNDED, arguments, {"stochastic": stochastic}
    for weights, moments, stochastic in itertools.product(HALVES, [torch.float32, torch.bfloat16], [True, False]):
        arguments = [values(weights), values(weights), values(moments), values(moments).abs()]
        arguments += [*numbers(0.1, 0.99, 0.01, 0.999, 1e-3, 0.5, 1e-8), salt]
        yield adamw.STEP, arguments, {"stochastic": stochastic}
    for weights, stochastic in zip(HALVES, [True, False, True], strict=True):
        weight, grad = (torch.randn(30, 64, generator=generator).to(weights) for _ in range(2))
        codes = torch.randint(-127, 128, (30, 64), generator=generator, dtype=torch.int8)
        of_squares = torch.randint(0, 256, (30, 64), generator=generator, dtype=torch.uint8)
        scales = [torch.rand(30, generator=generator) for _ in range(2)]
        arguments = [weight, grad, codes, scales[0], of_squares, scales[1]]
        arguments += [*numbers(0.1, 0.99, 0.01, 0.999, 1e-3, 0.5, 1e-8), salt]
        yield adamw.STEP_CODES, arguments, {"stochastic": stochastic}
    for matrices in (torch.float32, torch.bfloat16, torch.float64):
        wide = torch.promote_types(matrices, torch.float32)
        sums = torch.tensor([[0.0, 0.0], [2.0, 1e-88], [3e76, 0.0], [1e-90, 0.0]], dtype=torch.float64)
        yield newton_schulz.SUM_SQUARES, [values(matrices, 1000).view(20, 50), torch.empty(20).double()], {}
        yield newton_schulz.INVERT, [sums, torch.empty(4, dtype=wide), torch.empty(4, dtype=wide)], {}
        for dtype in (matrices, torch.float16):
            factors = [torch.tensor([2.0, 0.25], dtype=wide), torch.tensor([0.3, 0.7], dtype=wide)]
            out = torch.empty(2, 500, dtype=dtype)
            yield newton_schulz.SCALE, [values(matrices, 1000).view(2, 500), *factors, out], {}


@pytest.mark.filterwarnings("ignore")
def test_what_is_traced_is_as_the_plain_function():
    """Call what a compiler gets; `tests/cuda` compares what one makes of it for CUDA."""
    for function, arguments, options in cases():
        copies = {id(argument): argument.clone() for argument in arguments}
        expected = [copies[id(argument)] for argument in arguments]
        with torch.no_grad(), compiling():
            function.plain(*expected, **options)
            compiler.call(function.plain, arguments, options, function.row)
        for one, other in zip(arguments, expected, strict=True):
            assert torch.equal(one, other), (function.name, options, [argument.dtype for argument in arguments])


class NoDivisionByNumbers(TorchDispatchMode):
    """Fails where a tensor is divided by a number, for which a CPU divides; compilers and cards multiply."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            assert torch.is_tensor(args[1]), operator
            assert args[1].ndim, operator
        return operator(*args, **kwargs or {})


def test_no_function_divides_by_a_number():
    for function, arguments, options in cases():
        with NoDivisionByNumbers():
            function.plain(*arguments, **options)


@pytest.mark.filterwarnings("ignore")
def test_a_step_calls_the_compiled_functions():
    """Take steps, in which products are never compiled, where a CPU counts as a device that torch compiles for."""
    torch._dynamo.utils.counters.clear()
    with compiling():
        params = [torch.nn.Parameter(torch.randn(20, 30)) for _ in range(3)]
        optimizer = Muon([{"params": params[:2]}, {"params": params[2:], "use_muon": False}])
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        names = {function.__name__ for function, *_ in compiler._functions}
    assert names == {"_move", "_apply", "_step", "_sum_squares", "_invert", "_scale"}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 10  # and the trial, and three for one matrix


def test_tensors_that_are_not_aligned_are_written():
    """Compiled functions get aligned tensors alone; a tensor that is passed twice is copied once."""

    def call(function, tensors, options, row=None):
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.ndim)
        function(*tensors, **options)

    flat = torch.arange(12.0)
    expected = flat.clone()
    target, result = expected[1:5], expected[7:11]
    _add(target, result, result, number(0.5))
    with mock.patch.object(compiler, "is_compiled", return_value=True), mock.patch.object(compiler, "call", call):
        ADD(flat[1:5], odd := flat[7:11], odd, number(0.5))
    assert torch.equal(flat, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_function_is_compiled_once_for_all_tensors_in_whatever_order_and_size_they_come():
    """Count compilations of tensors with gaps, in columns, of one element, and of odd sizes."""

    def add(target, addend):
        target.copy_(target + addend)

    function = Elementwise(add, reads=(0, 1), writes=(0,))
    shapes = [(6, 8), (8, 6), (1,), (3, 5), (2, 3, 16), (17,), (4, 4, 4), (5, 32)]

    def stored(shape, k):
        """Return a tensor that is contiguous, transposed, has gaps between rows, or between elements."""
        if k == 3 or (k == 2 and len(shape) == 1):
            return torch.randn(*shape, 2)[..., 1]
        if k == 0 or len(shape) == 1:
            return torch.randn(shape)
        return (
            torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
            if k == 1
            else torch.randn(*shape, 2).flatten(-2)[..., : shape[-1]]
        )

    torch._dynamo.utils.counters.clear()
    with compiling():
        compiler.readiness({torch.device("cpu"): [torch.float32]})
        compiler.decide(compiled=True)
        for shape, k, other in itertools.product(shapes, range(4), range(4)):
            target, addend = stored(shape, k), stored(shape, other)
            expected = target + addend
            over(function, [[target], [addend]])
            assert torch.equal(target, expected)
        kinds = len(compiler._functions)
    # 16 divides the size or not; neither has gaps, or one, or both. A row, and a row of one element, are compiled anew.
    assert kinds == 8
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3 * kinds


class BrokenError(Exception):
    pass


@pytest.mark.filterwarnings("ignore")
def test_an_error_of_a_compiled_function_is_raised_and_nothing_is_repeated():
    run = []

    def call(function, tensors, options, row=None):
        run.append(function)
        if len(run) == 12:
            raise BrokenError
        function(*tensors, **options)

    with compiling(), mock.patch.object(compiler, "call", call):
        param = torch.nn.Parameter(torch.randn(20, 30))
        optimizer = Muon([param])
        param.grad = torch.randn_like(param)
        with pytest.raises(BrokenError):
            _ = [optimizer.step() for _ in range(9)]
        assert len(run) == 12
        assert compiler.is_compiled(torch.device("cpu"))


def stepped():
    param = torch.nn.Parameter(torch.ones(20, 30))
    param.grad = torch.ones(20, 30)
    optimizer = Muon([param])
    optimizer.step()
    return param


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_that_fails_is_named_once_before_anything_moves(caplog, monkeypatch):
    monkeypatch.setattr(compiler, "_trial", lambda *tensors: 1 / 0)
    with accelerated():
        expected = stepped()
    with compiling():
        assert torch.equal(stepped(), expected)
        stepped()
        assert not compiler._functions
    (record,) = [record for record in caplog.records if "not compiled" in record.message]
    assert re.search(r"slower: \w+: \w+", record.message)


def test_a_device_without_its_compiler_takes_the_plain_functions(caplog):
    with compiling(package="no_such_compiler"):
        stepped()
    assert "there is no no_such_compiler for cpu" in caplog.text


def test_a_torch_without_an_option_takes_the_plain_functions(caplog, monkeypatch):
    monkeypatch.setattr(compiler, "_OPTIONS", {("no_such_option",): True})
    with compiling("inductor"):
        stepped()
    assert "has no option no_such_option of torch.compile" in caplog.text


def test_torch_compile_turned_off_takes_the_plain_functions_silently(caplog, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with compiling():
        stepped()
        assert not compiler.is_compiled(torch.device("cpu"))
    assert not caplog.records


def test_an_error_that_waited_on_the_device_is_not_the_compilers(monkeypatch):
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: exec("raise BrokenError"))
    with compiling(), pytest.raises(BrokenError):
        stepped()


@pytest.mark.filterwarnings("ignore")
def test_a_step_under_a_dispatch_mode_is_plain_and_later_ones_are_compiled():
    param = torch.nn.Parameter(torch.randn(20, 30))
    param.grad = torch.randn(20, 30)
    with compiling():
        optimizer = Muon([param])
        optimizer.step()
        with FlopCounterMode(display=False), mock.patch.object(compiler, "call") as call:
            optimizer.step()
        call.assert_not_called()
        with mock.patch.object(compiler, "call", wraps=compiler.call) as call:
            optimizer.step()
        call.assert_called()


@pytest.mark.filterwarnings("ignore")
def test_the_first_compilation_is_told_once(caplog):
    with caplog.at_level("INFO", "hf_muon"), compiling():
        stepped()
        stepped()
    assert caplog.text.count("the first step takes longer") == 1
