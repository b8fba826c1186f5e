"""Elementwise functions: many tensors at once are as one after the other, and compiled is as plain."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_muon import Muon
from hf_muon.math import adamw, elementwise, momentum, newton_schulz, update
from hf_muon.math.elementwise import Elementwise, adjacent, adjacent_runs, number, over, shaped_like
from tests.accelerated import accelerated

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


def has_cpp_compiler():
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except torch._inductor.exc.InvalidCxxCompiler:
        return False


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_is_as_the_plain_function(backend):
    if backend == "inductor" and not has_cpp_compiler():
        pytest.skip("inductor needs a C++ compiler here")
    for function, arguments, options in cases():
        copies = {id(argument): argument.clone() for argument in arguments}
        expected = [copies[id(argument)] for argument in arguments]
        with torch.no_grad():
            function.plain(*expected, **options)
            function.compiled(*arguments, backend=backend, **options)(*arguments, **options)
        for k, (one, other) in enumerate(zip(arguments, expected, strict=True)):
            if backend == "inductor" and function in (momentum.MOVE_CODES, adamw.STEP_CODES):
                # As below: few codes differ, and where they do, by one.
                assert (one != other).float().mean() < 0.01 or one.dtype.is_floating_point
                assert (one.float() - other.float()).abs().max() <= (0.05 if one.dtype.is_floating_point else 1)
                continue
            if backend == "inductor" and function is adamw.STEP and not k:
                # Square roots of torch and of a C++ compiler differ in their last bit.
                assert ((one - other).abs() <= 2 * torch.finfo(one.dtype).eps * other.abs().clamp(min=1e-3)).all()
                continue
            if backend == "inductor" and function is newton_schulz.SUM_SQUARES:
                torch.testing.assert_close(one, other, rtol=1e-13, atol=0)  # sums in another order
                continue
            assert torch.equal(one, other), (function.name, options, [argument.dtype for argument in arguments])


@pytest.mark.filterwarnings("ignore")
def test_a_step_calls_the_compiled_functions(monkeypatch):
    """Take a step, in which products are never compiled, where a CPU counts as a device that torch compiles for."""
    called = []

    def compiled(self, *tensors, backend="aot_eager", **options):
        function = own(self, *tensors, backend=backend, **options)
        called.append(self.name)
        return function

    own = Elementwise.compiled
    monkeypatch.setattr(Elementwise, "compiled", compiled)
    monkeypatch.setattr(elementwise, "_COMPILED", {"cpu": "torch"})
    of_norms = newton_schulz.SUM_SQUARES, newton_schulz.INVERT, newton_schulz.SCALE
    for function in (momentum.MOVE, update.APPLY, adamw.STEP, *of_norms):
        monkeypatch.setattr(function, "_compiled", {})
    torch._dynamo.utils.counters.clear()
    params = [torch.nn.Parameter(torch.randn(20, 30)) for _ in range(3)]
    optimizer = Muon([{"params": params[:2]}, {"params": params[2:], "use_muon": False}])
    with accelerated():
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    assert {*called} == {"move", "apply", "step", "sum_squares", "invert", "scale"}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 6


def test_tensors_that_are_not_aligned_are_written(monkeypatch):
    """Compiled functions get aligned tensors alone; a tensor that is passed twice is copied once."""
    monkeypatch.setattr(elementwise, "_COMPILED", {"cpu": "torch"})

    def compiled(self, *tensors, **options):
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.ndim)
        return self.plain

    monkeypatch.setattr(Elementwise, "compiled", compiled)
    flat = torch.arange(12.0)
    expected = flat.clone()
    target, result = expected[1:5], expected[7:11]
    _add(target, result, result, number(0.5))
    ADD(flat[1:5], odd := flat[7:11], odd, number(0.5))
    assert torch.equal(flat, expected)


def test_a_compiler_that_fails_is_replaced_by_the_plain_function_and_named_once(monkeypatch):
    monkeypatch.setattr(elementwise, "_COMPILED", {"cpu": "torch"})
    monkeypatch.setattr(Elementwise, "compiled", lambda *args, **options: 1 / 0)
    tensor = torch.ones(3)
    for _ in range(2):
        over(Elementwise(lambda tensor: tensor.add_(1), reads=(0,), writes=(0,)), [[tensor]])
    assert torch.equal(tensor, torch.full((3,), 3.0))
    assert elementwise.pop_failure() == "ZeroDivisionError: division by zero"
    assert elementwise.pop_failure() is None


def test_torch_compile_turned_off_takes_the_plain_function(monkeypatch):
    monkeypatch.setattr(elementwise, "_COMPILED", {"cpu": "torch"})
    cpu = torch.device("cpu")
    assert elementwise.compiles_on(cpu)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not elementwise.compiles_on(cpu)
    assert elementwise.pop_failure() is None


def test_the_first_compilation_is_told_once(monkeypatch):
    monkeypatch.setattr(elementwise, "_COMPILED", {"cpu": "torch"})
    monkeypatch.setattr(elementwise, "_begun", set())
    devices = [torch.device("cpu"), torch.device("meta")]
    assert [elementwise.first_compilation(devices) for _ in range(2)] == ["cpu", None]


def test_a_device_without_its_compiler_takes_the_plain_function(monkeypatch):
    monkeypatch.setattr(elementwise, "_COMPILED", {"cpu": "no_such_compiler"})
    tensor = torch.ones(3)
    over(Elementwise(lambda tensor: tensor.add_(1), reads=(0,), writes=(0,)), [[tensor]])
    assert torch.equal(tensor, torch.full((3,), 2.0))
    assert "no_such_compiler" in elementwise.pop_failure()
