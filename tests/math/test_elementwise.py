"""Elementwise functions: many tensors at once are as one after the other, and compiled is as plain."""

from __future__ import annotations

import contextlib
import itertools
import re
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from hf_muon import Muon
from hf_muon.math import compiler
from hf_muon.math.elementwise import Elementwise, adjacent, adjacent_runs, over, shaped_like
from hf_muon.math.moments import BLOCK, over_blocks
from tests.support.accelerated import accelerated, compiling, sized

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile


def _add(target, addend, result, factor):
    result.copy_(target + addend.to(result.dtype) * factor)
    target.copy_(result)


ADD = Elementwise(_add, reads=(0, 1), writes=(0, 2))


def stored(shape, kind, generator=None):
    """Return random numbers that are contiguous, transposed, or have gaps between their rows or their elements."""
    if kind == "gaps" or len(shape) == 1:
        return torch.randn(*shape, 1 + (kind != "contiguous"), generator=generator)[..., 0]
    if kind == "rows":
        return torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)[..., : shape[-1]]
    whole = torch.randn(*shape[:-2], *shape[:-3:-1], generator=generator).mT
    return whole.contiguous() if kind == "contiguous" else whole


KINDS = ("contiguous", "transposed", "rows", "gaps")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@given(
    rows=st.lists(st.tuples(SHAPES, st.sampled_from(KINDS), st.sampled_from(KINDS), DTYPES, DTYPES), max_size=8),
    copied_bytes=st.sampled_from([0, 400, 2**30]),
    run_bytes=st.sampled_from([100, 2**30]),
    chunk=st.sampled_from([3, 2**17]),
    path=st.sampled_from([accelerated, contextlib.nullcontext]),
)
def test_many_tensors_are_as_one_after_the_other(rows, copied_bytes, run_bytes, chunk, path):
    """Whether each is copied or in a call of its own, however many copies there may be, and in whatever chunks."""

    def columns():
        generator = torch.Generator().manual_seed(0)
        target = [stored(shape, kind, generator).to(dtype) for shape, kind, _, dtype, _ in rows]
        addend = [stored(shape, kind, generator).to(dtype) for shape, _, kind, _, dtype in rows]
        return target, addend, shaped_like(torch.empty(sum(tensor.numel() for tensor in target)), target)

    results, expected = columns(), columns()
    for row in zip(*expected, strict=True):
        _add(*row, 0.5)
    with sized(copied_bytes=copied_bytes, run_bytes=run_bytes, chunk=chunk), path():
        over(ADD, results, 0.5)
    for one, other in zip(itertools.chain(*results), itertools.chain(*expected), strict=True):
        assert torch.equal(one, other)


def test_calls_are_few():
    """Small contiguous tensors have one call, but each dtype its own, and so have large ones and those with gaps."""
    for sizes, copied_bytes, run_bytes, expected in (
        ([4, 4, "bf16", 4], 2**30, 2**30, [8, 4, 4]),
        ([4] * 3, 0, 2**30, [4, 4, 4]),
        ([4] * 5, 2**30, 40, [8, 8, 4]),
        ([4, 4, "gaps", 4], 2**30, 2**30, [8, 4, 4]),
    ):
        others = {"bf16": torch.ones(4, dtype=torch.bfloat16), "gaps": torch.ones(8)[::2]}
        tensors, calls = [others.get(size, torch.ones(4)) for size in sizes], []
        function = Elementwise(lambda own, calls=calls: calls.append(own.add_(1).numel()), reads=(0,), writes=(0,))
        with sized(copied_bytes=copied_bytes, run_bytes=run_bytes), accelerated():
            over(function, [tensors])
        assert calls == expected
        assert all((tensor == 2).all() for tensor in tensors)


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


# --- compiled; `tests/cuda` compares each function that is compiled with its plain twin


class BrokenError(Exception):
    pass


class Backend:
    """A compiler that returns what it gets, without products and with aligned tensors; it counts both.

    The call with the number `fails_at` raises an error; 0 is the first compilation.
    """

    def __init__(self, fails_at=None):
        self.compiled, self.calls, self.fails_at = 0, 0, fails_at

    def __call__(self, graph, inputs):
        if self.fails_at == 0:
            raise BrokenError("no kernel")
        self.compiled += 1
        assert not any(re.search(r"mm\b|matmul", str(node.target)) for node in graph.graph.nodes), "a product"

        def call(*args):
            self.calls += 1
            assert all(own.data_ptr() % 16 == 0 for own in args if torch.is_tensor(own) and own.ndim)
            if self.calls == self.fails_at:
                raise BrokenError
            return graph(*args)

        return call


def stepped(steps=1):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((20, 30), (20, 30), (9, 7))]
    optimizer = Muon([{"params": params[:2]}, {"params": params[2:], "use_muon": False}])
    for step in range(steps):
        for param in params:
            param.grad = torch.full_like(param, step + 1.0)
        optimizer.step()
    return params, optimizer


@pytest.fixture(scope="module")
def plain():
    with accelerated():
        return stepped(3)[0]


def test_a_step_calls_the_compiled_functions(plain, caplog):
    """A CPU counts as a device that torch compiles for. What is watched, as by a counter of FLOPs, is plain.

    An error of a compiled function is raised, and nothing is repeated.
    """
    with compiling(backend := Backend()):
        params, optimizer = stepped(3)
        assert all(map(torch.equal, params, plain))
        calls, compiled = backend.calls, backend.compiled
        stepped(3)
        assert backend.compiled == compiled > 0
        assert backend.calls > calls
        calls = backend.calls
        with FlopCounterMode(display=False):
            optimizer.step()
        assert backend.calls == calls
        backend.fails_at = calls + 3
        with pytest.raises(BrokenError):
            optimizer.step()
        assert backend.calls == calls + 3
        assert compiler.is_compiled(torch.device("cpu"))
    assert caplog.text.count("the first step takes longer") == 1


@pytest.mark.parametrize(
    ("compiles", "says"),
    [
        (lambda patch: compiling(Backend(fails_at=0)), r"slower: \w+: "),
        (lambda patch: compiling(package="no_such_compiler"), "there is no no_such_compiler for cpu"),
        (
            lambda patch: patch.setattr("torch._inductor.list_options", list) or compiling("inductor"),
            r"has no option triton\.autotune_pointwise of torch\.compile",
        ),
        (lambda patch: patch.setenv("TORCH_COMPILE_DISABLE", "1") or compiling(Backend()), None),  # users know why
    ],
    ids=["it fails", "there is none", "an option is unknown", "turned off"],
)
def test_where_nothing_can_be_compiled_functions_are_plain_and_why_is_said_once(
    compiles, says, plain, caplog, monkeypatch
):
    with compiles(monkeypatch):
        for _ in range(2):
            assert all(map(torch.equal, stepped(3)[0], plain))
            assert not compiler.is_compiled(torch.device("cpu"))
    messages = [record.message for record in caplog.records if record.name == "hf_muon"]
    assert len(messages) == (says is not None)
    assert all(re.search(says, message) for message in messages)


def test_why_functions_are_plain_is_said_also_if_the_first_step_was_refused(caplog):
    with compiling(Backend(fails_at=0)):
        params, optimizer = stepped(0)
        for value in (torch.nan, 1.0, 1.0):
            for param in params:
                param.grad = torch.full_like(param, value)
            with contextlib.nullcontext() if value == 1 else pytest.raises(RuntimeError, match="not finite"):
                optimizer.step()
    assert caplog.text.count("[not-compiled]") == 1


def test_an_error_that_waited_on_the_device_is_not_the_compilers(monkeypatch):
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: exec("raise BrokenError"))
    with compiling(Backend()), pytest.raises(BrokenError):
        stepped()


def test_a_function_is_compiled_once_for_all_tensors_in_whatever_order_and_size_they_come():
    """Tensors that are not aligned are copied for the compiler, one that is passed twice once, and written."""
    shapes = [(6, 8), (8, 6), (1,), (3, 5), (2, 3, 16), (17,), (4, 4, 4), (5, 32)]
    with compiling(backend := Backend()):
        compiler.try_on(torch.device("cpu"), [torch.float32])
        trial = backend.compiled
        add = Elementwise(lambda target, addend: target.copy_(target + addend), reads=(0, 1), writes=(0,))
        counts = []
        for order in (shapes, shapes[::-1]):
            for shape, kind, other in itertools.product(order, KINDS, KINDS):
                target, addend = stored(shape, kind), stored(shape, other)
                expected = target + addend
                over(add, [[target], [addend]])
                assert torch.equal(target, expected)
            counts.append(backend.compiled - trial)
        # Anew for what torch's guards tell apart, such as gaps; another time for nothing.
        assert 0 < counts[0] == counts[1] < len(shapes) * len(KINDS) ** 2

        flat = torch.arange(12.0)
        expected = flat.clone()
        _add(expected[1:5], expected[7:11], expected[7:11], 0.5)
        odd = flat[7:11]
        ADD(flat[1:5], odd, odd, 0.5)
        assert torch.equal(flat, expected)


def test_rows_that_do_not_end_with_a_block_stay_on_their_devices():
    add = Elementwise(lambda rows: rows.add_(1), reads=(0,), writes=(0,), row=BLOCK)
    column = [torch.zeros(3, 100), torch.zeros(3, 100, device="meta"), torch.zeros(2, 70)]
    calls = []
    with mock.patch.object(Elementwise, "__call__", lambda _, rows: calls.append(rows.device.type) or add.plain(rows)):
        over_blocks(add, [column])
    assert set(calls) == {"cpu", "meta"}
    assert all(bool((tensor == 1).all()) for tensor in column if tensor.device.type == "cpu")
