"""A step by the paths of accelerators, on a CPU: as the step of a CPU, bit-identical however it is divided, and without
values, as memory estimators take it.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_muon import Muon, build_optimizer
from tests.distributed.cases import assert_equal, make
from tests.equality.cells import Cell
from tests.equality.runs import alone
from tests.support.accelerated import (
    accelerated,
    compiling_but_on_rank_1,
    compiling_until_a_step_of_rank_1,
    given_gradients,
)

SHAPES = [(16, 32), (32, 16), (16, 32), (5, 24, 16), (4, 24, 16), (48, 16), (3, 24, 64), (10, 128)]
VIEWS = ["", "transposed", "", "rows 12+12", "", "rows 16*(1+2)", "rows 12+12", ""]
OF_ADAMW = [(7,), (300,), (20, 30), (4, 64), (1, 16), (0, 64)]


def made(dtype, **options):
    """Return an optimizer of a Muon and an AdamW group, one of whose parameters is transposed."""
    own = {"adamw_state_dtype": options.pop("adamw_state_dtype", "auto")}
    params = [nn.Parameter(weight) for weight in make([*SHAPES, *OF_ADAMW, (40, 64)], 0, dtype)]
    params[-1] = nn.Parameter(params[-1].detach().mT)
    n = len(SHAPES)
    groups = [{"params": params[:n], "views": VIEWS}, {"params": params[n:], "use_muon": False, **own}]
    if dtype is torch.float16:
        options["weight_rounding"] = "nearest"
    return Muon(groups, lr=0.01, weight_decay=0.1, ns_dtype="fp32", **options)


def step(optimizer, k):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, grad in zip(params, make([p.shape for p in params], k + 1, params[0].dtype), strict=True):
        param.grad = 1e-3 * grad
    if k == 1:
        params[len(SHAPES)].grad = None
    optimizer.step()


def tensors(optimizer):
    """Return weights and moments, and whether Muon steps them."""
    groups = [(param, group["use_muon"]) for group in optimizer.param_groups for param in group["params"]]
    return [(tensor, muon) for p, muon in groups for tensor in (p.detach(), *optimizer.state[p].values())]


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
    """Compare each of three steps from the state that a CPU has left."""
    optimizer = made(dtype, **options)
    for k in range(3):
        twin = copy.deepcopy(optimizer)
        for each, path in ((optimizer, contextlib.nullcontext), (twin, accelerated)):
            with path():
                step(each, k)
        for (one, muon), (other, _) in zip(tensors(twin), tensors(optimizer), strict=True):
            assert one.dtype == other.dtype
            if not one.numel():
                continue
            if one.dtype in (torch.int8, torch.uint8):
                # AdamW's are rounded at random, by a hash of numbers that differ in their last bits.
                off = one.float() - other.float()
                assert off.abs().max() <= 1
                assert off.abs().mean() < 0.01 if muon else off.sum().abs() <= 2 * off.numel() ** 0.5
                continue
            # Where momentum in 8 bits differs by a code, so does the update that is of what is stored.
            coarse = torch.bfloat16 if muon and "int8" in options.values() else torch.float32
            eps = max(torch.finfo(own).eps for own in (one.dtype, dtype, coarse))
            one, other = one.double(), other.double()
            assert (one - other).abs().max() <= 4 * eps * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_one_by_one_and_all_together_give_equal_bits(dtype, options):
    results = []
    for copied_bytes in (0, 2**40):
        optimizer = made(dtype, **options)
        with accelerated(copied_bytes):
            for k in range(3):
                step(optimizer, k)
        results.append(tensors(optimizer))
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(*results, strict=True))


def test_it_is_not_the_step_of_a_cpu_bit_by_bit():
    """Show that cells with a GPU's numbers (`tests.equality`) take other paths than those of a CPU."""
    assert alone(Cell(numbers="gpu"))["last"] != alone(Cell())["last"]


# --- ranks, of which one cannot compile


@pytest.mark.first_tier("fsdp-False")
@pytest.mark.second_tier("fsdp|ddp-True")
@pytest.mark.parametrize("first_alone", [False, True])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_where_one_rank_cannot_compile_none_does(pools, layout, first_alone):
    (results, compiled, lines), (others, *rest) = pools[2].run(
        compiling_but_on_rank_1, layout=layout, first_alone=first_alone
    )
    assert_equal([results, others], given_gradients(0, "single"))
    assert not compiled
    assert rest == [False, []]
    (line,) = lines
    assert "not compiled" in line
    assert "no no_such_compiler for cpu [rank 1]" in line


@pytest.mark.extended
@pytest.mark.second_tier("fsdp")
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_where_the_compiler_of_one_rank_fails_in_a_step_that_step_ends_and_later_ones_compile_nothing(pools, layout):
    (results, count, *is_on, lines), (others, few, *rest) = pools[2].run(
        compiling_until_a_step_of_rank_1, layout=layout
    )
    assert_equal([results, others], given_gradients(0, "single"))
    assert count > few == 2
    assert [*is_on, *rest] == [False, False, []]
    (line,) = lines
    assert "no space left on device" in line
    assert "[rank 1]" in line


# --- without values


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_bytes": 1},
        {"momentum_dtype": "bf16", "weight_rounding": "nearest"},
        {"momentum_dtype": "int8", "adamw_state_dtype": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_without_values_has_the_state_of_one_with_values(dtype, options, tmp_path):
    """Nothing measures metrics, or counts the weights that rounding to nearest leaves as they are."""
    facts = []
    for k, mode in enumerate((contextlib.nullcontext(), torch.device("meta"), FakeTensorMode())):
        file = tmp_path / str(k)
        with mode:
            # Wide enough for the Gram form.
            layers = nn.Linear(140, 65, dtype=dtype), nn.LayerNorm(65, dtype=dtype), nn.Linear(65, 30, dtype=dtype)
            model = nn.Sequential(*layers)
            optimizer = build_optimizer(model, diagnostics_every=1, diagnostics_file=file, **options)
            for _ in range(3):
                for param in model.parameters():
                    param.grad = torch.randn_like(param)
                optimizer.step()
                if k < 2:
                    optimizer.load_state_dict(optimizer.state_dict())
            counters = [state["step"] for state in optimizer.state.values() if "step" in state]
            assert {group["step"] for group in optimizer.param_groups} == {3}
            assert {float(counter) for counter in counters if not counter.is_meta} <= {3.0}
        assert file.exists() == (k == 0)
        states = [optimizer.state[param] for param in model.parameters()]
        facts.append([{key: (value.shape, value.dtype) for key, value in state.items()} for state in states])
    assert facts[0] == facts[1] == facts[2]


def test_the_counter_is_on_the_device_where_the_fused_kernel_steps():
    for dtype, device in (("auto", "meta"), ("fp32", "meta"), ("bf16", "cpu"), ("int8", "cpu")):
        param = nn.Parameter(torch.empty(32, 64, device="meta"))
        optimizer = Muon([{"params": [param], "use_muon": False, "adamw_state_dtype": dtype}])
        optimizer.init_state()
        assert optimizer.state[param]["step"].device.type == device
