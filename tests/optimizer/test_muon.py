"""The results of a step, compared with torch, with a reference, and with the step itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.live_bytes import LiveBytes
from hf_muon import Muon, orthogonalize
from hf_muon.math.adamw import CHUNK
from hf_muon.math.coefficients import PRESETS, resolve
from tests.optimizer.cases import REST, SHAPES, both_gradients, both_halves, gradients, parameters, run
from tests.reference import ReferenceMuon, relative_difference


class TestAgainstTorch:
    """torch.optim.Muon, patched to multiply in fp32 instead of bf16, follows the same rule."""

    pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

    @pytest.fixture
    def _fp32_torch_muon(self, monkeypatch):
        def in_fp32(grad, ns_coefficients, ns_steps, eps):
            a, b, c = ns_coefficients
            x = grad.T if grad.size(0) > grad.size(1) else grad
            x = x / x.norm().clamp(min=eps)
            for _ in range(ns_steps):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            return x.T if grad.size(0) > grad.size(1) else x

        monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_fp32)

    @pytest.mark.usefixtures("_fp32_torch_muon")
    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    def test_ten_steps(self, nesterov, adjust_lr_fn, weight_decay):
        options = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "weight_decay": weight_decay}
        start, ours, theirs = parameters(), parameters(), parameters()
        run(Muon(ours, ns_coefficients="original", ns_dtype="fp32", **options), ours, gradients())
        run(torch.optim.Muon(theirs, **options), theirs, gradients())
        assert relative_difference(start, theirs, ours) < 1e-5

    def test_unmodified_torch_in_bf16(self):
        start, ours, theirs = parameters(), parameters(), parameters()
        options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "original"}
        run(Muon(ours, ns_coefficients="original", ns_dtype="bf16", **options), ours, gradients())
        run(torch.optim.Muon(theirs, **options), theirs, gradients())
        assert relative_difference(start, theirs, ours) < 2e-2


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original", "spectral_unclamped"])
def test_ten_steps_against_the_reference(preset, nesterov, adjust_lr_fn):
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    start, ours = parameters(), parameters()
    reference = ReferenceMuon(start, steps=resolve(preset), **options)
    run(Muon(ours, ns_coefficients=preset, ns_dtype="fp32", **options), ours, gradients())
    for grads in gradients():
        reference.step(grads)
    # The steps of cans amplify fp32 rounding more.
    assert relative_difference(start, reference.params, ours) < {"cans": 2e-5}.get(preset, 1e-5)


def test_three_numbers_are_the_original_preset():
    one, other = parameters(), parameters()
    run(Muon(one, ns_coefficients="original"), one, gradients())
    run(Muon(other, ns_coefficients=(3.4445, -4.7750, 2.0315)), other, gradients())
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_stack_is_its_matrices():
    shapes = [(3, 20, 12)]
    start, stack = parameters(shapes), parameters(shapes)
    apart = [nn.Parameter(matrix.detach().clone()) for matrix in stack[0]]
    grads = gradients(shapes)
    run(Muon(stack, lr=0.02, ns_dtype="fp32"), stack, grads)
    run(Muon(apart, lr=0.02, ns_dtype="fp32"), apart, [list(step[0]) for step in grads])
    assert relative_difference(start, stack, [torch.stack([p.detach() for p in apart])]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [CHUNK, 3])
def test_adamw_half_is_bit_equal_to_torch(dtype, elements, monkeypatch):
    monkeypatch.setattr("hf_muon.math.adamw.CHUNK", elements)
    optimizer, ours = both_halves(dtype, lr=3e-3, weight_decay=0.1, adamw_betas=(0.8, 0.95), adamw_eps=1e-6)
    theirs = parameters(REST, dtype=dtype)
    adamw = torch.optim.AdamW(theirs, lr=3e-3, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    run(optimizer, ours, both_gradients(10, dtype))
    run(adamw, theirs, [grads[len(SHAPES) :] for grads in both_gradients(10, dtype)])
    rest = ours[len(SHAPES) :]
    assert all(torch.equal(a, b) for a, b in zip(rest, theirs, strict=True))
    for a, b in zip(rest, theirs, strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[a][key], adamw.state[b][key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adamw_half_of_half_precision_is_that_of_torch_in_fp32_rounded_once(dtype):
    optimizer, ours = both_halves(dtype, lr=3e-3, weight_decay=0.1, weight_rounding="nearest")
    theirs = [nn.Parameter(param.detach().float()) for param in parameters(REST, dtype=dtype)]
    adamw = torch.optim.AdamW(theirs, lr=3e-3, weight_decay=0.1)
    for grads in both_gradients(10, dtype):
        run(optimizer, ours, [grads])
        run(adamw, theirs, [[grad.float() for grad in grads[len(SHAPES) :]]])
        for param in theirs:
            param.data.copy_(param.detach().to(dtype))
    for a, b in zip(ours[len(SHAPES) :], theirs, strict=True):
        assert torch.equal(a.float(), b)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[a][key], adamw.state[b][key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_follow_the_fp32_run(dtype):
    """Allow one rounding per step: momentum is fp32, and each step rounds the weights once."""
    steps = 6
    grads = gradients(steps=steps, dtype=dtype)
    exact = [nn.Parameter(p.detach().float()) for p in parameters(dtype=dtype)]
    half = parameters(dtype=dtype)
    optimizer, exact_optimizer = Muon(half, lr=0.02), Muon(exact, lr=0.02)
    run(optimizer, half, grads)
    run(exact_optimizer, exact, [[g.float() for g in step] for step in grads])
    for a, b in zip(half, exact, strict=True):
        assert a.dtype == dtype
        rounding = torch.finfo(dtype).eps * b.abs().max()
        assert (a.float() - b).abs().max() <= steps * rounding
        buffer = optimizer.state[a]["momentum_buffer"]
        assert torch.equal(buffer, exact_optimizer.state[b]["momentum_buffer"])


def test_batching_does_not_mix_up_matrices():
    """Step matrices of equal shape, which are stacked: each direction must return to its own parameter."""
    params = parameters([(12, 20)] * 5)
    starts = [p.detach().clone() for p in params]
    grads = gradients([(12, 20)] * 5, steps=1)
    run(Muon(params, lr=0.5, momentum=0.0, nesterov=False, ns_dtype="fp32"), params, grads)
    for param, start, grad in zip(params, starts, grads[0], strict=True):
        expected = start - 0.5 * 0.2 * 20**0.5 * orthogonalize(grad, ns_dtype="fp32")
        torch.testing.assert_close(param.detach(), expected, rtol=0, atol=1e-5)


def test_parameters_without_gradient_stay():
    params = parameters()
    optimizer = Muon(params)
    run(optimizer, params, gradients(steps=2))
    before = [p.detach().clone() for p in params]
    buffers = [optimizer.state[p]["momentum_buffer"].clone() for p in params]
    grads = gradients(steps=1, seed=5)[0]
    grads[1] = None
    run(optimizer, params, [grads])
    for i, param in enumerate(params):
        assert torch.equal(param, before[i]) == (i == 1)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], buffers[i]) == (i == 1)


def test_no_gradients_at_all_is_no_step():
    params = parameters()
    optimizer = Muon(params)
    optimizer.step()
    assert not optimizer.state


def test_zero_gradient_and_zero_lr_move_nothing():
    params = parameters()
    start = parameters()
    run(Muon(params, lr=0.1), params, [[torch.zeros(s) for s in SHAPES]])
    run(Muon(params, lr=0.0, weight_decay=0.1), params, gradients(steps=1))
    assert all(torch.equal(a, b) for a, b in zip(params, start, strict=True))


def test_gradients_are_not_written_to():
    optimizer, params = both_halves(weight_decay=0.1)
    grads = both_gradients(1)[0]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_the_moving_average_of_raw_gradients(nesterov):
    """Check that Newton-Schulz leaves the buffer unchanged: without nesterov, the update is an alias of it."""
    params = parameters()
    optimizer = Muon(params, nesterov=nesterov)
    run(optimizer, params, gradients(steps=3))
    for i, param in enumerate(params):
        expected = torch.zeros(SHAPES[i])
        for grads in gradients(steps=3):
            expected = 0.95 * expected + 0.05 * grads[i]
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], expected)


def test_closure():
    """Step with the gradients of the closure, and return its loss."""
    weight = nn.Parameter(torch.randn(6, 4))
    twin = nn.Parameter(weight.detach().clone())
    target = torch.randn(6, 4)
    optimizer = Muon([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight - target).square().sum()
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), (twin - target).square().sum())
    twin.grad = 2 * (twin.detach() - target)
    Muon([twin], lr=0.1).step()
    assert torch.equal(weight, twin)


def test_schedulers_move_both_halves():
    optimizer, params = both_halves(lr=1.0)
    optimizer.param_groups[1]["lr"] = 0.5
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    run(optimizer, params, both_gradients(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.05])
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1.0, 0.5], total_steps=10)
    run(optimizer, params, both_gradients(1))
    cycle.step()
    assert optimizer.param_groups[0]["momentum"] != 0.95
    late = {"params": parameters([(4, 4)]), "initial_lr": 0.1, "lr": 0.1}
    optimizer.add_param_group(late)


def test_tensor_lr():
    one, other = parameters(), parameters()
    run(Muon(one, lr=torch.tensor(0.02)), one, gradients())
    run(Muon(other, lr=float(torch.tensor(0.02))), other, gradients())
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_gradients_may_be_so_large_that_their_squares_are_infinite():
    (first, second), (param, twin) = gradients([(40, 30)], 1)[0] * 2, parameters([(40, 30)]) + parameters([(40, 30)])
    run(Muon([param], ns_dtype="fp32"), [param], [[first]])
    run(Muon([twin], ns_dtype="fp32"), [twin], [[second * 2.0**100]])
    assert torch.equal(param, twin)


def test_grad_scaler_skips_overflow_and_leaves_moments_clean():
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer = Muon([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight.grad = torch.full((6, 4), float("inf"))
    before = weight.detach().clone()
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, before)
    assert not optimizer.state
    grad = torch.randn(6, 4)
    twin = nn.Parameter(before.clone())
    weight.grad, twin.grad = grad * scaler.get_scale(), grad.clone()
    scaler.step(optimizer)
    Muon([twin], lr=0.1).step()
    torch.testing.assert_close(weight, twin)


def test_empty_matrices_change_nothing_of_the_others():
    params, twin = parameters([(4, 4), (0, 4)]), parameters([(4, 4)])
    own = gradients([(4, 4), (0, 4)], 2)
    run(Muon(params), params, own)
    run(Muon(twin), twin, [step[:1] for step in own])
    assert torch.equal(params[0], twin[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_holds_no_more_than_it_may(dtype):
    """Bound the temporary memory for any number of parameters; smaller batches must not change the result."""
    shapes = [(64, 128)] * 12 + [(16, 48, 32), (400, 500), (160, 40)]
    rest = [(3000, 100), (7,)]
    results = []
    # The largest matrix alone takes 4.9 MB.
    for limit in (1, 5_000_000):  # batches of one matrix, and of several
        params, others = parameters(shapes, dtype), parameters(rest, dtype)
        groups = [{"params": params}, {"params": others, "use_muon": False}]
        optimizer = Muon(groups, ns_dtype="fp32", max_batch_bytes=limit)
        grads = [[grad.to(dtype) for grad in step] for step in gradients(shapes + rest, 2)]
        run(optimizer, params + others, grads[:1])
        for param, grad in zip(params + others, grads[1], strict=True):
            param.grad = grad
        with LiveBytes() as memory:
            optimizer.step()
        assert memory.peak < max(limit, 5_000_000)
        results.append(params)
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_int8_momentum_is_read_matrix_by_matrix():
    (param,), (grad,) = parameters([(16384, 256)]), gradients([(16384, 256)], 1)[0]
    optimizer = Muon([{"params": [param], "views": ["rows 256x64"]}], ns_dtype="fp32", momentum_dtype="int8")
    run(optimizer, [param], [[grad]])
    param.grad = grad
    with LiveBytes() as memory:
        optimizer.step()
    assert memory.peak < 4 * param.numel()


@given(
    shapes=st.lists(st.tuples(st.integers(2, 12), st.integers(2, 12)), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    lr=st.floats(0, 0.1),
    weight_decay=st.floats(0, 0.5),
    momentum=st.floats(0, 0.99),
    nesterov=st.booleans(),
    steps=st.integers(1, 3),
)
def test_property_follows_the_reference(shapes, dtype, lr, weight_decay, momentum, nesterov, steps):
    options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
    start, ours = parameters(shapes, dtype), parameters(shapes, dtype)
    reference = ReferenceMuon(start, steps=resolve("original", 5), adjust_lr_fn="original", **options)
    grads = gradients(shapes, steps, dtype)
    run(Muon(ours, ns_coefficients="original", adjust_lr_fn="original", ns_dtype="fp32", **options), ours, grads)
    for step in grads:
        reference.step(step)
    largest = max(float(p.detach().abs().max()) for p in [*start, *reference.params])
    tolerance = steps * (torch.finfo(dtype).eps * largest + 1e-4 * lr)
    for a, b in zip(ours, reference.params, strict=True):
        assert (a.double() - b).abs().max() <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_adamw_half_is_torchs_fused_kernel(dtype):
    ours = [nn.Parameter(p.detach().cuda()) for p in parameters(REST, dtype)]
    theirs = [nn.Parameter(p.detach().cuda()) for p in parameters(REST, dtype)]
    grads = [[g.cuda() for g in step] for step in gradients(REST, 5, dtype)]
    run(Muon([{"params": ours, "use_muon": False}]), ours, grads)
    run(torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.0, fused=True), theirs, grads)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
