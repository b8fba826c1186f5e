"""AdamW of the same optimizer: torch's, in any dtypes; its moments as `adamw_state_dtype` stores them; rare rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from hf_muon import Muon
from hf_muon.math.moments import BLOCK, MOMENTS, decoded
from hf_muon.storage.tensors import STEPPED_DTYPES
from tests.optimizer.cases import adamw_over, bits, equal, gradients, normal, parameters, run

# Vectors, and tensors of one chunk and of several.
MANY = [(3,), (700, 700), (5, 2), (1,), (1000,), (), (40,), (100, 16)]


@pytest.mark.parametrize("weights", STEPPED_DTYPES)
@pytest.mark.parametrize("grads", STEPPED_DTYPES)
def test_adamw_is_that_of_torch(weights, grads):
    """Equal torch's AdamW bit by bit in fp32 and fp64; else, with gradients converted, but for a unit of rounding."""
    if weights != grads and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has one dtype for both")
    computed = torch.promote_types(weights, torch.float32)
    shapes = MANY if weights == grads else [(8, 1000)]
    ours = parameters(shapes, weights)
    theirs = [nn.Parameter(param.detach().to(computed, copy=True)) for param in ours]
    options = {"lr": 3e-3, "weight_decay": 0.1}
    group = {"params": ours, "use_muon": False, "adamw_betas": (0.8, 0.95), "adamw_eps": 1e-6}
    optimizer = Muon([group], weight_rounding="nearest", **options)
    adamw = torch.optim.AdamW(theirs, betas=(0.8, 0.95), eps=1e-6, **options)
    for each in gradients(shapes, 4, grads):
        for a, b, grad in zip(ours, theirs, each, strict=True):
            if weights != grads:
                a.grad_dtype = None
            a.grad, b.grad = grad.clone(), grad.to(computed)
        optimizer.step()
        adamw.step()
        for a, b in zip(ours, theirs, strict=True):
            if weights == grads == computed:
                assert torch.equal(a, b)
                assert equal({**optimizer.state[a]}, {**adamw.state[b]})
                continue
            torch.testing.assert_close(a.to(computed), b.detach(), rtol=torch.finfo(weights).eps, atol=1e-7)
            b.data = a.detach().to(computed)
            for key, moment in adamw.state[b].items():
                torch.testing.assert_close(optimizer.state[a][key], moment, rtol=1e-6, atol=1e-7)
                moment.copy_(optimizer.state[a][key])


@pytest.mark.parametrize("dtype", STEPPED_DTYPES)
@pytest.mark.parametrize("adamw_state_dtype", ["auto", "fp32", "bf16"])
def test_gradients_are_taken_as_long_as_the_moments_of_torch_are_finite(dtype, adamw_state_dtype):
    """Refuse others: such a weight would never move again. In fp16, whose own squares overflow, all are taken."""
    stored = torch.bfloat16 if adamw_state_dtype == "bf16" else torch.promote_types(dtype, torch.float32)
    overflows, largest = math.sqrt(torch.finfo(stored).max), torch.finfo(dtype).max
    weight = nn.Parameter(torch.randn(12, dtype=dtype)[::2])
    optimizer = adamw_over(weight, adamw_state_dtype=adamw_state_dtype, weight_rounding="nearest")
    size = min(overflows * 0.97, largest)
    run(optimizer, [weight], [[torch.full((6,), sign * size, dtype=dtype)] for sign in (1, -1, 1)])
    assert all(moment.isfinite().all() for moment in optimizer.state[weight].values())
    if overflows < largest:
        with pytest.raises(RuntimeError, match="gradient-too-large"):
            run(optimizer, [weight], [[torch.full((6,), 1.01 * overflows, dtype=dtype)]])


@pytest.mark.parametrize("form", [float, torch.tensor])
@pytest.mark.parametrize("lr", [-4.4e-21, -1e-12, 0.0])
def test_a_schedule_may_end_a_rounding_error_below_zero(form, lr):
    """Accept the slightly negative last rate of LinearLR, as torch's AdamW does; it is zero, and the run resumes."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 3), 3)]  # which the tiniest rate would move
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}], ns_dtype="fp32")
    for group in optimizer.param_groups:
        group["lr"] = form(lr)
    for _ in range(2):
        run(optimizer, params, [[torch.ones(3, 3), torch.ones(3)]])
        optimizer.load_state_dict(optimizer.state_dict())
    assert not any(param.any() for param in params)


# --- moments in few bits


@pytest.mark.parametrize("option", ["bf16", "int8"])
def test_moments_follow_those_of_fp32(option):
    """Take 300 steps: a second moment that were rounded to nearest in bf16 would stop at 0.84 of its value."""
    options = {"lr": 1e-4, "weight_decay": 0.0}
    param, reference = (nn.Parameter(torch.zeros(8, 96, dtype=d)) for d in (torch.bfloat16, torch.float32))
    optimizer = adamw_over(param, adamw_state_dtype=option, adamw_betas=(0.9, 0.99), **options)
    exact = torch.optim.AdamW([reference], betas=(0.9, 0.99), **options)
    for k in range(300):
        grad = (1 + 0.1 * normal(8, 96, seed=k)).bfloat16()
        param.grad, reference.grad = grad, grad.float()
        optimizer.step()
        exact.step()
    pairs = [(decoded(optimizer.state[param], key), exact.state[reference][key]) for key in DECAY]
    for one, other in [*pairs, (param.detach(), reference.detach())]:
        assert float(one.double().mean() / other.double().mean()) == pytest.approx(1, abs=0.01)


# --- rows that seldom have a gradient, as those of an embedding: how far moments in int8 may be from fp32
#
# Every bound is that of the codes: a rounding moves a moment by less than the distance to the next level, and the decay
# of the average moves what was wrong before.

PERIODS = torch.tensor([50, 7, 1, 101, 1000])  # steps between two gradients of each row, the last of which has none
DECAY = {"exp_avg": 0.9, "exp_avg_sq": 0.95}
FP32 = 1e-5  # rounding of fp32, over all steps


def rows(width, **options):
    param = nn.Parameter(torch.zeros(len(PERIODS), width))
    return param, adamw_over(param, lr=1e-3, weight_decay=0.0, adamw_betas=tuple(DECAY.values()), **options)


def to_the_next_level(state, key):
    """Return the distance from what each code stands for to the level above, which is that to the one below or more."""
    code = MOMENTS[key]
    codes, scales = state[key].double().abs(), state[code.scale].double()
    scales = scales.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    return ((codes + 1) ** code.power - codes**code.power) / code.largest**code.power * scales


def updates(first, second, step):
    first, second = (m / (1 - beta**step) for m, beta in zip((first, second), DECAY.values(), strict=True))
    return first / (second.sqrt() + 1e-8)


@pytest.mark.parametrize("width", [64, 100])
def test_rows_are_as_near_to_fp32_as_their_codes(width):
    """Take steps in most of which a row has no gradient: those add no error to its moments."""
    (exact, reference), (param, optimizer) = rows(width), rows(width, adamw_state_dtype="int8")
    errors = {key: torch.zeros(exact.shape, dtype=torch.float64) for key in DECAY}
    error, path = (torch.zeros(exact.shape, dtype=torch.float64) for _ in range(2))
    for k in range(151):
        has_gradient = (k % PERIODS == 0) & (PERIODS < 1000)
        grad = normal(len(PERIODS), width, seed=k)
        grad = grad.sign() * (0.5 + 1.5 * torch.rand(grad.shape)) * has_gradient.unsqueeze(1)
        before = {key: value.clone() for key, value in optimizer.state[param].items()}
        run(reference, [exact], [[grad]])
        run(optimizer, [param], [[grad]])
        stored, expected = optimizer.state[param], reference.state[exact]
        for key, beta in DECAY.items():
            if before:
                assert torch.equal(stored[key][~has_gradient], before[key][~has_gradient])
            errors[key] = beta * errors[key] + to_the_next_level(stored, key) * has_gradient.unsqueeze(1)
            assert ((decoded(stored, key) - expected[key]).abs() <= errors[key] + FP32 * expected[key].abs()).all()
        first, second = (expected[key].double() for key in DECAY)
        apart = torch.zeros_like(error)
        for up, away in itertools.product((1, -1), repeat=2):
            least = (second - up * errors["exp_avg_sq"]).clamp_min(0)
            corner = updates(first + away * errors["exp_avg"], least, k + 1)
            apart = apart.maximum((corner - updates(first, second, k + 1)).abs())
        error += 1e-3 * apart
        path += 1e-3 * updates(first, second, k + 1).abs()
        assert ((param - exact).abs() <= error + FP32 * path).all()
    assert (error <= 0.05 * path)[PERIODS >= 50][:-1].all(), "or the bounds say little"
    assert not param[-1].any()


@pytest.mark.parametrize("ratio", [1e-1, 1e-3, 1e-4, 1e-6, 1e-12])
def test_small_elements_of_a_rare_row_are_bounded(ratio):
    """Let one element of a block have nearly all of its gradient, every 50th step: the others move a few times as far.

    Without rounding all elements move alike. Rounded, the first moment of a small one is at most the next level, and
    the root of the second at least the level below, or the first one.
    """
    param, optimizer = rows(64, adamw_state_dtype="int8")
    grad = torch.full(param.shape, ratio)
    grad[:, 5] = 1.0
    above, below = math.floor(127 * ratio**0.5) + 1, max(1, math.floor(255 * ratio**0.5))
    bound = (above / 127) ** 2 / (below / 255) ** 2
    for k in range(101):
        param.grad = grad * (k % 50 == 0)
        before = param.detach().clone()
        optimizer.step()
        moved = (param - before).abs()
        assert (moved <= 1.02 * bound * moved[:, 5:6]).all()  # 0.9**50 of the rounding before is left
        assert optimizer.state[param]["exp_avg_sq"].all()


def test_rows_of_rare_tokens_follow_fp32():
    """Step an embedding whose rows have gradients in every step, or in one of 2, 4, ... 256."""
    ends = {}
    for option in ("fp32", "bf16", "int8"):
        weight = nn.Parameter(torch.zeros(9, 128))
        optimizer = adamw_over(weight, adamw_state_dtype=option, lr=1e-3)
        for k in range(512):
            grad = normal(9, 128, seed=k) + normal(9, 128, seed=1000)
            often = torch.tensor([k % 2**row == 0 for row in range(9)])
            run(optimizer, [weight], [[grad * often.unsqueeze(1)]])
        ends[option] = weight.detach()
    for option, bound in (("bf16", 0.02), ("int8", 0.06)):
        errors = (ends[option] - ends["fp32"]).norm(dim=1) / ends["fp32"].norm(dim=1)
        assert float(errors.max()) < bound, f"{option}: {errors.tolist()}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_adamw_is_torchs_fused_kernel(dtype):
    ours, theirs = ([nn.Parameter(p.detach().cuda()) for p in parameters(MANY, dtype)] for _ in range(2))
    grads = [[g.cuda() for g in each] for each in gradients(MANY, 5, dtype)]
    run(Muon([{"params": ours, "use_muon": False}]), ours, grads)
    run(torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.0, fused=True), theirs, grads)
    assert equal(bits(ours), bits(theirs))
