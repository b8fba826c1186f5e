"""The results of a step of matrices, compared with torch, with a reference, and with the step itself."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.live_bytes import LiveBytes
from hf_muon import Muon
from hf_muon.math.coefficients import PRESETS, resolve
from tests.optimizer.cases import (
    REST,
    SHAPES,
    bits,
    both_gradients,
    both_halves,
    equal,
    gradients,
    normal,
    parameters,
    run,
    step,
    stepped,
)
from tests.reference import ReferenceMuon, moved, relative_difference

# --- against torch, and against SVDs in float64


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_torchs_muon_in_bf16(nesterov, adjust_lr_fn, weight_decay):
    options = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "weight_decay": weight_decay}
    start, ours, theirs = parameters(), parameters(), parameters()
    run(Muon(ours, ns_coefficients="original", ns_dtype="bf16", **options), ours, gradients())
    run(torch.optim.Muon(theirs, **options), theirs, gradients())
    assert relative_difference(start, theirs, ours) < 2e-2


SCALES = [{"adjust_lr_fn": "match_rms_adamw", "update_rms": rms} for rms in (0.2, 0.05, 0.4)]
SCALES += [{"adjust_lr_fn": "original"}, {"adjust_lr_fn": "spectral_unclamped"}]


@pytest.mark.promise("one-process")
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("k", range(len(SCALES)))
def test_ten_steps_against_the_reference(preset, k):
    nesterov = (k + list(PRESETS).index(preset)) % 2 == 0
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, **SCALES[k]}
    shapes = [*SHAPES, (3, 20, 12)]  # a stack is its matrices
    start, ours = parameters(shapes), parameters(shapes)
    optimizer = Muon(ours, ns_coefficients=preset, ns_dtype="fp32", **options)
    reference = ReferenceMuon(start, steps=resolve(preset), **options)
    run(optimizer, ours, gradients(shapes))
    for grads in gradients(shapes):
        reference.step(grads)
    # The steps of cans amplify fp32 rounding more.
    bound = {"cans": 2e-5}.get(preset, 1e-5) * max(1, 0.2 / options.get("update_rms", 0.2))
    assert relative_difference(start, reference.params, ours) < bound
    for param, buffer in zip(ours, reference.buffers, strict=True):
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], buffer.float(), rtol=1e-5, atol=1e-6)


@given(
    shapes=st.lists(st.tuples(st.integers(2, 12), st.integers(2, 12)), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    lr=st.floats(0, 0.1),
    weight_decay=st.floats(0, 0.5),
    momentum=st.floats(0, 0.99),
    nesterov=st.booleans(),
    steps=st.integers(1, 3),
)
def test_small_matrices_follow_the_reference(shapes, dtype, lr, weight_decay, momentum, nesterov, steps):
    options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
    start, ours = parameters(shapes, dtype), parameters(shapes, dtype)
    reference = ReferenceMuon(start, steps=resolve("original", 5), adjust_lr_fn="original", **options)
    grads = gradients(shapes, steps, dtype)
    run(Muon(ours, ns_coefficients="original", adjust_lr_fn="original", ns_dtype="fp32", **options), ours, grads)
    for each in grads:
        reference.step(each)
    largest = max(float(p.detach().abs().max()) for p in [*start, *reference.params])
    tolerance = steps * (torch.finfo(dtype).eps * largest + 1e-4 * lr)
    for a, b in zip(ours, reference.params, strict=True):
        assert (a.double() - b).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_follow_the_fp32_run(dtype):
    """Allow one rounding per step: momentum is fp32, and each step rounds the weights once."""
    grads = gradients(steps=6, dtype=dtype)
    half, exact = parameters(dtype=dtype), [nn.Parameter(p.detach().float()) for p in parameters(dtype=dtype)]
    optimizer, exact_optimizer = Muon(half, lr=0.02), Muon(exact, lr=0.02)
    run(optimizer, half, grads)
    run(exact_optimizer, exact, [[g.float() for g in each] for each in grads])
    for a, b in zip(half, exact, strict=True):
        assert a.dtype == dtype
        assert (a.float() - b).abs().max() <= 6 * torch.finfo(dtype).eps * b.abs().max()
        assert equal(optimizer.state[a], exact_optimizer.state[b])


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has one dtype for both")
def test_gradients_of_another_dtype_are_taken_as_they_are():
    """Add an fp32 gradient of bf16 weights to the fp32 momentum without rounding."""
    weights = [nn.Parameter(torch.zeros(5, 7, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    buffers = []
    for weight in weights:
        optimizer = Muon([weight])
        weight.grad_dtype = None
        weight.grad = normal(5, 7)
        optimizer.step()
        buffers.append(optimizer.state[weight]["momentum_buffer"])
    assert torch.equal(*buffers)


# --- equal options


EQUAL = {
    "the default of update_rms": ({}, {"update_rms": 0.2}),
    "three numbers are the original preset": (
        {"ns_coefficients": "original"},
        {"ns_coefficients": (3.4445, -4.7750, 2.0315)},
    ),
    "a rate as a tensor": ({"lr": torch.tensor(0.02)}, {"lr": float(torch.tensor(0.02))}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_options_that_mean_the_same(name):
    results = []
    for options in EQUAL[name]:
        params = parameters()
        results.append(bits(run(Muon(params, **options), params, gradients(steps=3))))
    assert equal(*results)


@pytest.mark.parametrize("lr", [numpy.float32(0.01), numpy.float64(0.01), numpy.int64(1), 1, torch.tensor(0.01)])
def test_a_schedule_may_write_numbers_of_any_kind(lr):
    (model, optimizer), (twin, other) = stepped(), stepped()
    optimizer.param_groups[0]["lr"], other.param_groups[0]["lr"] = lr, float(lr)
    step(optimizer)
    step(other)
    assert equal(bits(model.parameters()), bits(twin.parameters()))


# --- what a step leaves alone


def test_parameters_without_gradient_stay():
    params = parameters()
    optimizer = Muon(params)
    run(optimizer, params, gradients(steps=2))
    before = [(p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()) for p in params]
    grads = gradients(steps=1, seed=5)[0]
    grads[1] = None
    run(optimizer, params, [grads])
    for i, (param, (weight, buffer)) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(param, weight) == (i == 1)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], buffer) == (i == 1)


def test_zero_gradient_and_zero_lr_move_nothing():
    params = parameters()
    run(Muon(params, lr=0.1), params, [[torch.zeros(s) for s in SHAPES]])
    run(Muon(params, lr=0.0, weight_decay=0.1), params, gradients(steps=1))
    assert equal(bits(params), bits(parameters()))


@pytest.mark.parametrize("nesterov", [True, False])
def test_gradients_are_not_written_to(nesterov):
    optimizer, params = both_halves(weight_decay=0.1, nesterov=nesterov)
    grads = both_gradients(1)[0]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    assert equal([p.grad for p in params], grads)


def test_empty_matrices_change_nothing_of_the_others():
    params, twin = parameters([(4, 4), (0, 4)]), parameters([(4, 4)])
    own = gradients([(4, 4), (0, 4)], 2)
    run(Muon(params), params, own)
    run(Muon(twin), twin, [each[:1] for each in own])
    assert torch.equal(params[0], twin[0])


def test_closure():
    """Step with the gradients of the closure, and return its loss."""
    weight, target = nn.Parameter(torch.randn(6, 4)), torch.randn(6, 4)
    twin = nn.Parameter(weight.detach().clone())
    optimizer = Muon([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight - target).square().sum()
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), (twin - target).square().sum())
    run(Muon([twin], lr=0.1), [twin], [[2 * (twin.detach() - target)]])
    assert torch.equal(weight, twin)


def test_grad_scaler_skips_overflow_and_leaves_moments_clean():
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer, before = Muon([weight], lr=0.1), weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight.grad = torch.full((6, 4), float("inf"))
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, before)
    assert not optimizer.state
    grad, twin = torch.randn(6, 4), nn.Parameter(before.clone())
    weight.grad = grad * scaler.get_scale()
    scaler.step(optimizer)
    run(Muon([twin], lr=0.1), [twin], [[grad]])
    torch.testing.assert_close(weight, twin)


# --- large gradients

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_large_gradients_of_changing_sign_are_refused_or_keep_weights_finite(momentum_dtype, nesterov):
    for size in (LARGEST, 2e38, 1e38, LARGEST / 4, 1e37):
        weight = nn.Parameter(normal(4, 32))
        optimizer = Muon([weight], nesterov=nesterov, momentum_dtype=momentum_dtype)
        for sign in (1, -1, -1, 1):
            weight.grad = torch.full((4, 32), sign * size)
            if size > LARGEST / 4:
                with pytest.raises(RuntimeError, match="gradient-too-large"):
                    optimizer.step()
            else:
                optimizer.step()
            assert weight.isfinite().all()
            assert all(moment.float().isfinite().all() for moment in optimizer.state.get(weight, {}).values())


def test_large_gradients_that_a_step_can_take_are_taken():
    """Accept gradients whose squares, or the sum of whose squares, overflow."""
    weight = nn.Parameter(torch.zeros(300, 300))
    run(Muon([weight], lr=0.1), [weight], [[torch.full((300, 300), 8e37)]])
    assert weight.isfinite().all()
    assert weight.any()
    (grad,), results = gradients([(40, 30)], 1)[0], []
    for scale in (1.0, 2.0**100):
        (param,) = parameters([(40, 30)])
        results.append(bits(run(Muon([param], ns_dtype="fp32"), [param], [[grad * scale]])))
    assert equal(*results)


# --- memory


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
        first, second = gradients(shapes + rest, 2, dtype)
        run(optimizer, params + others, [first])
        for param, grad in zip(params + others, second, strict=True):
            param.grad = grad
        with LiveBytes() as memory:
            optimizer.step()
        assert memory.peak < 5_000_000
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


# --- whatever else the optimizer holds


# So small that batched products round differently from single ones.
SMALL = [(5, 25), (26, 5), (11, 23), (13, 23), (3, 5, 25)] * 4
WHOLE, STAGES = [slice(0, None)], [slice(0, 7), slice(7, 12), slice(12, None)]


def changes(parts, nudge=False, wrap=lambda call: call, **options):
    """Return the change of each matrix, with one optimizer for each of `parts`.

    With `nudge`, gradients differ by one unit in the last place.
    """
    params, start = parameters(SMALL), parameters(SMALL)
    calls = [wrap(Muon(params[part], lr=0.1, ns_dtype="fp32", **options).step) for part in parts]
    for grads in gradients(SMALL, 3):
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch.nextafter(grad, torch.full_like(grad, torch.inf)) if nudge else grad
        for call in calls:
            call()
    return [param.detach() - before.detach() for param, before in zip(params, start, strict=True)]


def test_stages_of_a_model_are_within_rounding_of_the_whole():
    """Compare stages, which batch other matrices together; the control moves gradients by one ulp."""
    whole = changes(WHOLE)
    assert moved(changes(STAGES), whole) <= 10 * moved(changes(WHOLE, nudge=True), whole)


def test_matrices_that_are_computed_one_by_one_do_not_depend_on_what_else_is_there():
    assert equal(changes(STAGES, max_batch_bytes=1), changes(WHOLE, max_batch_bytes=1))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_the_step():
    assert equal(changes(WHOLE, wrap=torch.compile), changes(WHOLE))


def test_a_group_that_is_added_is_stepped_as_one_that_was_there():
    late, alone = parameters([(8, 12)], seed=7), parameters([(8, 12)], seed=7)
    optimizer, params = both_halves(lr=0.02)
    optimizer.add_param_group({"params": late, "lr": 0.1, "momentum": 0.5})
    grads = gradients(SHAPES + REST + [(8, 12)], 3)
    run(optimizer, params + late, copy.deepcopy(grads))
    run(Muon(alone, lr=0.1, momentum=0.5), alone, [each[-1:] for each in grads])
    assert torch.equal(late[0], alone[0])
