"""A step by the paths of accelerators, on a CPU: as the step of a CPU, and bit-identical however it is divided."""

from __future__ import annotations

import importlib
import itertools
import math

import pytest
import torch
from torch import nn

from benchmarks.live_bytes import LiveBytes
from hf_muon import Muon
from hf_muon.math import weight_rounding
from hf_muon.math.adamw import Stepped, adamw_
from hf_muon.math.adamw_functions import next_values
from hf_muon.math.codes import FOURTH_POWERS, SQUARES, Quantized
from hf_muon.math.elementwise import number
from hf_muon.math.moments import decoded
from hf_muon.optimizer.state import state_keys, zero_state
from tests.accelerated import accelerated, compiling_but_on_rank_1, decided_before, given_gradients
from tests.distributed.cases import assert_equal
from tests.distributed.cases import given_gradients as on_cpu

SHAPES = [(16, 32), (32, 16), (16, 32), (5, 24, 16), (4, 24, 16), (48, 16), (3, 24, 64), (10, 128)]
OF_ADAMW = (20, 30)
VIEWS = ["", "transposed", "", "rows 12+12", "", "rows 16*(1+2)", "rows 12+12", ""]


def stepped(dtype, steps=3, **options):
    """Return weights, the sum of which moves, and the state of a Muon and an AdamW group after some steps."""
    generator = torch.Generator().manual_seed(0)

    def random(shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    matrices = [nn.Parameter(random(shape)) for shape in SHAPES]
    vectors = [nn.Parameter(random(shape)) for shape in [(7,), (300,), OF_ADAMW]]
    groups = [
        {"params": matrices, "views": VIEWS},
        {"params": vectors, "use_muon": False, "adamw_state_dtype": options.pop("adamw_state_dtype", "auto")},
    ]
    optimizer = Muon(groups, lr=0.01, weight_decay=0.1, ns_dtype="fp32", **options)
    for step in range(steps):
        for param in [*matrices, *vectors]:
            param.grad = random(param.shape, 1e-3)
        if step == 1:
            vectors[0].grad = None
        optimizer.step()
    params = [*matrices, *vectors]
    return [tensor for param in params for tensor in (param.detach(), *optimizer.state[param].values())]


def near(one, other, dtype):
    """Return whether tensors are equal but for rounding, in the dtype of the weights, or in that of a moment."""
    eps = max(torch.finfo(own).eps for own in (one.dtype, dtype))
    one, other = one.double(), other.double()
    return bool((one - other).abs().max() <= 4 * eps * max(1.0, float(other.abs().max()))) if one.numel() else True


OPTIONS = [
    {},
    {"nesterov": False},
    {"momentum_dtype": "bf16", "adamw_state_dtype": "bf16"},
    {"momentum_dtype": "int8", "adamw_state_dtype": "int8"},
    {"weight_rounding": "nearest"},
    {"adjust_lr_fn": "spectral_unclamped"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_the_step_of_a_cpu_but_for_rounding(dtype, options):
    expected = stepped(dtype, **options)
    with accelerated():
        results = stepped(dtype, **options)
    # Moments of few bits are rounded differently where they differ in their last bits before.
    coarse = torch.bfloat16 if {"bf16", "int8"} & {*options.values()} else torch.float32
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype
        if one.dtype is torch.int8 and one.shape == OF_ADAMW:
            # Rounded at random, by a hash of numbers that differ in their last bits: by a level in each of three steps.
            off = (one.float() * one.float().abs() - other.float() * other.float().abs()) / 127**2
            assert off.abs().max() <= 3 * 2 / 127
            assert off.mean().abs() <= 1e-3
        elif one.dtype is torch.int8:
            assert (one.float() - other.float()).abs().max() <= 2
            assert (one != other).float().mean() < 0.05
        elif one.dtype is not torch.uint8:
            assert near(one, other, coarse if dtype.itemsize > 2 else dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_one_by_one_and_all_together_give_equal_bits(dtype, options):
    with accelerated(copied_bytes=0):
        alone = stepped(dtype, **options)
    with accelerated(copied_bytes=2**40):
        together = stepped(dtype, **options)
    assert all(map(torch.equal, alone, together))


def test_it_is_not_the_step_of_a_cpu_bit_by_bit():
    """Show that cells with a GPU's numbers (`tests.equality`) take other paths than those of a CPU."""
    pairs = zip(itertools.chain(*given_gradients(0, "single")), itertools.chain(*on_cpu(0, "single")), strict=True)
    assert not all(itertools.starmap(torch.equal, pairs))


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_where_one_rank_cannot_compile_none_does(pools, layout):
    expected = given_gradients(0, "single")
    (results, compiled, lines), (others, *rest) = pools[2].run(compiling_but_on_rank_1, layout=layout)
    assert_equal([results, others], expected)
    assert not compiled
    assert rest == [False, []]
    (line,) = lines
    assert "not compiled" in line
    assert "no no_such_compiler for cpu [rank 1]" in line


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_ranks_that_have_decided_differently_refuse(pools, layout):
    for error in pools[2].run(decided_before, layout=layout):
        assert "weights and moments are as they were" in error
        assert (
            "are compiled in this process (TORCH_COMPILE_DISABLE=1 compiles on no rank) [compiled-differently] [rank 0]"
            in error
        )
        assert "are not compiled in this process: there is no no_such_compiler for cpu" in error


@pytest.mark.parametrize("exponent", [-149, -140, -126, -100, -60, 60, 100, 120])
def test_directions_do_not_depend_on_the_scale(exponent):
    """Down to the least number of fp32, and up to norms that it does not have."""
    from hf_muon.math.newton_schulz import orthogonalize

    matrix = torch.randint(-100, 101, (2, 40, 60)).float()  # keeps its bits among subnormal numbers
    with accelerated():
        expected = orthogonalize(matrix)
        assert expected.abs().max() > 0.1
        assert torch.equal(orthogonalize(torch.ldexp(matrix, torch.tensor(exponent))), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_matrices_are_normalized_as_on_a_cpu(dtype):
    module = importlib.import_module("hf_muon.math.newton_schulz")
    matrices = (torch.randn(5, 30, 20) * torch.tensor([1e-4, 1.0, 100.0, 0.0, 1e-2]).view(5, 1, 1)).to(dtype)
    exact = matrices.double() / torch.linalg.matrix_norm(matrices.double(), keepdim=True).clamp(min=1e-300)
    for products in (torch.float32, torch.bfloat16):
        result = module._normalized_in_three(matrices, products, None)
        assert result.dtype is products
        assert (result - exact).abs().max() <= 2 * torch.finfo(products).eps * exact.abs().max()
        assert not result[3].any()
        there = torch.empty_like(result)
        assert module._normalized_in_three(matrices, products, there) is there
        assert torch.equal(there, result)


def test_normalizing_copies_no_batch_where_nothing_is_compiled(monkeypatch):
    module = importlib.import_module("hf_muon.math.newton_schulz")
    monkeypatch.setattr(module, "_PLAIN_ELEMENTS", 4000)
    matrices = torch.randn(64, 50, 80)
    with LiveBytes() as live:
        result = module._normalized_in_three(matrices, torch.bfloat16, None)
    each = 50 * 80 * 8
    assert live.peak <= result.nbytes + 4 * each + 64 * 50 * 8


def test_orthogonalizing_in_the_memory_of_the_input_changes_nothing():
    from hf_muon.math.coefficients import resolve
    from hf_muon.math.newton_schulz import Orthogonalizer

    shapes = [(3, 80, 160), (3, 160, 80), (2, 50, 50), (1, 7, 3), (5, 7, 3), (3, 11, 31)]
    for shape, dtype, steps, limit in itertools.product(
        shapes, [torch.float32, torch.bfloat16], [4, 5], [1, 4000, 2**20]
    ):
        orthogonalizer = Orthogonalizer(resolve("polar_express", steps), dtype, limit)
        for matrices in (torch.randn(shape), torch.randn(shape).bfloat16()):
            expected = orthogonalizer(matrices)
            assert torch.equal(orthogonalizer(matrices.clone(), overwrite=True), expected)


@pytest.mark.parametrize("copied_bytes", [0, None], ids=["alone", "copied"])
@pytest.mark.parametrize("rounding", ["auto", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_moments_in_8_bits_are_decoded_stepped_and_stored(dtype, rounding, copied_bytes):
    """Compare with one parameter after the other, decoded and encoded as on a CPU, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(20, 30), (4, 64), (3, 5, 128), (700, 192), (1, 16), (64, 30), (0, 64)]
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    params.append(torch.randn(64, 40, generator=generator).to(dtype).T)
    group = {"use_muon": False, "adamw_state_dtype": "int8", "momentum_offload": "none"}
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "rounding": rounding}
    stepped = [
        Stepped(p, torch.empty_like(p), {k: zero_state(p, k, group) for k in state_keys(group, p)}) for p in params
    ]
    expected = [Stepped(p.clone(), g, {k: v.clone() for k, v in state.items()}) for p, g, state in stepped]
    for step in (1, 2, 3):
        for own in stepped:
            own.grad.copy_(torch.randn(own.param.shape, generator=generator) * 1e-3)
        with accelerated(copied_bytes):
            adamw_(stepped, step=step, **options)
        for param, grad, state in expected:
            state["step"] += 1
            rates = [number(rate) for rate in (1 - 0.9, 0.95, 1 - 0.95)]
            corrections = 1 - 0.9**step, 1 - 0.95**step
            factors = [number(x) for x in (1 - 0.01 * 0.1, 0.01 / corrections[0], 1 / math.sqrt(corrections[1]), 1e-8)]
            moments = [decoded(state, key) for key in ("exp_avg", "exp_avg_sq")]
            exact, *moments = next_values(param, grad, *moments, rates, factors)
            for key, moment, code in zip(("exp_avg", "exp_avg_sq"), moments, (SQUARES, FOURTH_POWERS), strict=True):
                if moment.numel():
                    Quantized(state[key], state[f"{key}_scale"], code).store_rounded_(moment.float(), step)
            if dtype.itemsize < 4 and rounding == "auto":
                weight_rounding.store_([weight_rounding.Result(param, exact, moments[0])], rounding, step)
            else:
                param.copy_(exact)
        for one, other in zip(stepped, expected, strict=True):
            assert torch.equal(one.param, other.param)
            assert all(torch.equal(value, other.state[key]) for key, value in one.state.items())


def test_the_counter_is_on_the_device_where_the_fused_kernel_steps():
    for dtype, device in (("auto", "meta"), ("fp32", "meta"), ("bf16", "cpu"), ("int8", "cpu")):
        param = nn.Parameter(torch.empty(32, 64, device="meta"))
        optimizer = Muon([{"params": [param], "use_muon": False, "adamw_state_dtype": dtype}])
        optimizer.init_state()
        assert optimizer.state[param]["step"].device.type == device
