"""The results of a step of matrices, compared with torch and a float64 reference; weights in bf16."""

from __future__ import annotations

import gc
import itertools
import json
import math
import weakref
from collections import UserList
from unittest.mock import Mock

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_muon import Muon, orthogonalize
from hf_muon.math.coefficients import PRESETS, resolve
from hf_muon.math.moments import decoded
from hf_muon.optimizer import step_plan
from tests.math.test_rounding import rounded
from tests.optimizer.cases import SHAPES, bits, both_gradients, both_halves, equal, gradients, normal, parameters, run
from tests.support.live_bytes import LiveBytes
from tests.support.reference import ReferenceMuon, relative_difference

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
    rounding = ("auto", "nearest", "stochastic")[k % 3]  # fp32 weights are not rounded
    optimizer = Muon(ours, ns_coefficients=preset, ns_dtype="fp32", weight_rounding=rounding, **options)
    reference = ReferenceMuon(start, steps=resolve(preset), **options)
    run(optimizer, ours, gradients(shapes))
    for grads in gradients(shapes):
        reference.step(grads)
    bound = 1e-5 * max(1, 0.2 / options.get("update_rms", 0.2))
    assert relative_difference(start, reference.params, ours) < bound
    for param, buffer in zip(ours, reference.buffers, strict=True):
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], buffer.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "of_grads"), [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_half_precision_parameters_follow_the_fp32_run(dtype, of_grads):
    """Allow one rounding per step: momentum is fp32 and takes gradients as they are; a step rounds weights once."""
    if dtype != of_grads and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has one dtype for both")
    grads = gradients(steps=6, dtype=of_grads)
    half, exact = parameters(dtype=dtype), [nn.Parameter(p.detach().float()) for p in parameters(dtype=dtype)]
    for param in half if dtype != of_grads else []:
        param.grad_dtype = None
    options = NEAREST if dtype is torch.float16 else {}
    optimizer, exact_optimizer = Muon(half, lr=0.02, **options), Muon(exact, lr=0.02)
    run(optimizer, half, grads)
    run(exact_optimizer, exact, [[g.float() for g in each] for each in grads])
    for a, b in zip(half, exact, strict=True):
        assert a.dtype == dtype
        assert (a.float() - b).abs().max() <= 6 * torch.finfo(dtype).eps * b.abs().max()
        assert equal(optimizer.state[a], exact_optimizer.state[b])


# --- momentum in few bits

# Several blocks of 8 bits in a row, part of a block, a stack, and rows that are too short for a scale.
WIDE = [(24, 150), (16, 40), (3, 10, 70), (20, 8)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum_dtype", ["bf16", "int8"])
def test_a_step_is_that_of_fp32_from_what_is_stored(momentum_dtype, nesterov, tmp_path):
    """Momentum in bf16 is rounded after the update, at random; with 8 bits the update is of what is stored.

    Metrics see what codes stand for.
    """
    params, file = parameters(WIDE), tmp_path / "file"
    options = {"momentum_dtype": momentum_dtype, "nesterov": nesterov}
    options |= {"diagnostics_every": 5, "diagnostics_file": file}
    optimizer = Muon(params, lr=0.02, weight_decay=0.1, ns_dtype="fp32", **options)
    optimizer.init_state()
    for step, grads in enumerate(gradients(WIDE, 5), 1):
        before = [(p.detach().clone(), decoded(optimizer.state[p], "momentum_buffer").clone()) for p in params]
        run(optimizer, params, [grads])
        for param, grad, (weight, buffer) in zip(params, grads, before, strict=True):
            exact, state = (grad - buffer.float()) * (1 - 0.95) + buffer.float(), optimizer.state[param]
            stored = decoded(state, "momentum_buffer").float()
            update = exact - (exact - grad) * (1 - 0.95) if nesterov else exact
            if momentum_dtype == "bf16":
                assert torch.equal(stored, rounded(exact, step))
            elif "momentum_scale" in state:
                assert (stored - exact).norm() < 0.01 * exact.norm()
                update = stored - (stored - grad) * (1 - 0.95) if nesterov else stored
            else:
                assert torch.equal(stored, exact)
            direction = orthogonalize(update, ns_dtype="fp32")
            weight.mul_(1 - 0.02 * 0.1).add_(direction * (-0.02 * 0.2 * math.sqrt(max(weight.shape[-2:]))))
            assert torch.equal(param, weight)
    rms = [float(decoded(optimizer.state[param], "momentum_buffer").float().square().mean().sqrt()) for param in params]
    assert json.loads(file.read_text().splitlines()[-1])["momentum_rms"] == pytest.approx(rms, rel=1e-5)


# --- rates, closures, and what a step leaves alone


@pytest.mark.parametrize("lr", [numpy.float32(0.01), numpy.float64(0.01), numpy.int64(1), 1, torch.tensor(0.01)])
def test_a_rate_is_a_number_of_any_kind_also_one_that_a_schedule_writes(lr):
    results = []
    for first, then in ((0.02, lr), (0.02, float(lr)), (lr, 0.02), (float(lr), 0.02)):
        params = parameters()
        optimizer = Muon(params, lr=first)
        run(optimizer, params, gradients(steps=1))
        optimizer.param_groups[0]["lr"] = then
        results.append(bits(run(optimizer, params, gradients(steps=1, seed=3))))
    assert equal(results[0], results[1])
    assert equal(results[2], results[3])


@pytest.mark.parametrize("nesterov", [True, False])
def test_what_a_step_leaves_alone(nesterov):
    """A parameter without gradient, all of them at a rate of zero, gradients, and what is beside empty matrices."""
    optimizer, params = both_halves(weight_decay=0.1, nesterov=nesterov)
    run(optimizer, params, both_gradients(2))
    before = [(p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in params]
    grads = both_gradients(1, seed=5)[0]
    grads[1] = grads[-1] = None
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()
    assert equal([p.grad for p in params], grads)
    for param, grad, (weight, state) in zip(params, grads, before, strict=True):
        assert torch.equal(param, weight) == equal(optimizer.state[param], state) == (grad is None)

    still, params = parameters(), parameters([(4, 4), (0, 4)])
    run(Muon(still, lr=0.0, weight_decay=0.1), still, gradients(steps=1))
    run(Muon(still, lr=0.1), still, [[torch.zeros(s) for s in SHAPES]])
    assert equal(bits(still), bits(parameters()))
    own, twin = gradients([(4, 4), (0, 4)], 2), parameters([(4, 4)])
    run(Muon(params), params, own)
    run(Muon(twin), twin, [each[:1] for each in own])
    assert torch.equal(params[0], twin[0])


def test_closures():
    """Step with the gradients of the closure, and return its loss."""
    (weight,), (twin,), target = parameters([(6, 4)]), parameters([(6, 4)]), normal(6, 4)
    optimizer = Muon([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight - target).square().sum()
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), (twin - target).square().sum())
    run(Muon([twin], lr=0.1), [twin], [[2 * (twin.detach() - target)]])
    assert torch.equal(weight, twin)


# --- large gradients

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_large_gradients_of_changing_sign_are_refused_or_keep_weights_finite(momentum_dtype, nesterov):
    for size, sign in itertools.product((LARGEST, 2e38, 1e38, LARGEST / 4, 1e37), (1, -1, -1, 1)):
        if sign == 1:
            weight = nn.Parameter(normal(4, 32))
            optimizer = Muon([weight], nesterov=nesterov, momentum_dtype=momentum_dtype)
        weight.grad = torch.full((4, 32), sign * size)
        if size > LARGEST / 4:
            with pytest.raises(RuntimeError, match="gradient-too-large"):
                optimizer.step()
        else:
            optimizer.step()
        assert weight.isfinite().all()
        assert all(moment.float().isfinite().all() for moment in optimizer.state.get(weight, {}).values())


# --- memory, and compilation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_holds_no_more_than_it_may(dtype):
    """Bound the temporary memory for any number of parameters; smaller batches must not change the result."""
    shapes = [(64, 128)] * 12 + [(16, 48, 32), (400, 500), (160, 40), (3000, 100), (7,)]
    results = []
    # The largest matrix alone takes 4.9 MB.
    for limit in (1, 5_000_000):  # batches of one matrix, and of several
        params = parameters(shapes, dtype)
        groups = [{"params": params[:-2]}, {"params": params[-2:], "use_muon": False}]
        optimizer = Muon(groups, ns_dtype="fp32", max_batch_bytes=limit)
        first, second = gradients(shapes, 2, dtype)
        run(optimizer, params, [first])
        for param, grad in zip(params, second, strict=True):
            param.grad = grad
        with LiveBytes() as memory:
            optimizer.step()
        assert memory.peak < 5_000_000
        results.append(params)
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_int8_momentum_is_read_matrix_by_matrix():
    (param,), (grad,) = parameters([(8192, 256)]), gradients([(8192, 256)], 1)[0]
    optimizer = Muon([{"params": [param], "views": ["rows 128x64"]}], ns_dtype="fp32", momentum_dtype="int8")
    run(optimizer, [param], [[grad]])
    param.grad = grad
    with LiveBytes() as memory:
        optimizer.step()
    assert memory.peak < 4 * param.numel()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_the_step():
    results = []
    for wrap in (torch.compile, lambda step: step):
        params = parameters()
        step = wrap(Muon(params, lr=0.1, ns_dtype="fp32").step)
        for grads in gradients(steps=3):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            step()
        results.append(bits(params))
    assert equal(*results)


# --- bf16 weights under both algorithms

BOTH = pytest.mark.parametrize("use_muon", [True, False], ids=["muon", "adamw"])
NEAREST = {"weight_rounding": "nearest"}


def change(start, grads, dtype, use_muon, **options):
    """Return how far a weight moves from `start`, in fp32."""
    param = nn.Parameter(start.to(dtype))
    before = param.detach().float().clone()
    optimizer = Muon([{"params": [param], "use_muon": use_muon}], ns_dtype="fp32", **options)
    run(optimizer, [param], [[grad.to(dtype)] for grad in grads])
    return param.detach().float() - before


@BOTH
@pytest.mark.first_tier("adamw")
def test_small_updates_are_not_lost(use_muon):
    """Step along a constant gradient: weights end where fp32 weights do, and do not if they round to nearest."""
    start, grads = normal(64, 256, scale=0.02).bfloat16().float(), [normal(64, 256, seed=1).bfloat16().float()]

    def progress(steps, **options):
        own = {"lr": 1e-5, "ns_steps": 1}  # which give a direction, too
        exact = change(start, grads * steps, torch.float32, use_muon, **own)
        rounded = change(start, grads * steps, torch.bfloat16, use_muon, **own, **options)
        return float((rounded * exact).sum() / exact.square().sum())

    # Each element ends within a few random roundings of a unit in the last place; their projection is their mean.
    assert progress(1000) == pytest.approx(1, abs=0.01)
    assert progress(50, weight_rounding="nearest") < 0.5, "what rounding to nearest loses"


@BOTH
def test_fp16_weights_are_rounded_to_nearest_by_those_who_write_it(use_muon):
    start, grad = normal(64, 64).half(), normal(64, 64, seed=1).half()
    ends = []
    for dtype in (torch.float16, torch.float32):
        param = nn.Parameter(start.to(dtype, copy=True))
        optimizer = Muon([{"params": [param], "use_muon": use_muon}], lr=0.1, ns_dtype="fp32")
        if dtype is torch.float16:
            with pytest.raises(RuntimeError, match="fp16-weights"):
                run(optimizer, [param], [[grad]])
            optimizer.param_groups[0].update(NEAREST)
        run(optimizer, [param], [[grad.to(dtype)]])
        ends.append(param.detach().float())
    torch.testing.assert_close(*ends, rtol=2**-11 + 2**-20, atol=2**-24)


def test_norm_weights_do_not_move_in_lockstep():
    grad = 1 + normal(4096).abs()  # of one sign: all weights go down
    down = change(torch.ones(4096), [grad], torch.bfloat16, use_muon=False, lr=1e-3) < 0
    # A step of 1e-3, where the values below one lie 2**-8 apart.
    assert float(down.double().mean()) == pytest.approx(1e-3 * 2**8, abs=0.03)


@pytest.mark.parametrize(
    ("dtype", "lrs", "options", "warnings"),
    [
        (torch.bfloat16, (2e-5,) * 3, NEAREST, 1),
        (torch.bfloat16, (2e-5,), {}, 0),
        (torch.float32, (2e-5,), NEAREST, 0),
        (torch.bfloat16, (0.0, 1e-5, 1e-2), NEAREST, 0),  # a warmup, at whose end nearly all weights move
    ],
)
def test_a_warning_says_once_what_share_is_lost(dtype, lrs, options, warnings, caplog):
    params = [nn.Parameter(normal(64, 64, seed=seed, scale=0.02).to(dtype)) for seed in range(2)]
    groups = [{"params": [param], "use_muon": muon} for param, muon in zip(params, (True, False), strict=True)]
    optimizer = Muon(groups, lr=max(lrs), ns_dtype="fp32", **options)
    for k, lr in enumerate(lrs):
        for group in optimizer.param_groups:
            group["initial_lr"], group["lr"] = max(lrs), lr
        run(optimizer, params, [[normal(64, 64, seed=k).to(dtype)] * 2])
    assert caplog.text.count("[weights-cannot-move]") == warnings
    assert not warnings or ("learning rate of 2e-05, 8" in caplog.text and "bfloat16" in caplog.text)  # 80 to 89 %


@pytest.mark.parametrize(
    ("factors", "has_gradient", "warnings"),
    [([1.0, 1.0], True, 1), ([1.0, 1000.0], True, 0), ([1.0, 1.0], False, 0)],
    ids=["both", "one at a rate that moves it", "only the one that moves"],
)
def test_a_warning_is_about_the_weights_that_are_stepped_at_their_rates(factors, has_gradient, warnings, caplog):
    small, large = (nn.Parameter(normal(n, n, scale=scale).bfloat16()) for n, scale in ((16, 1e-4), (64, 0.1)))
    empty = nn.Parameter(torch.zeros(0, 0, dtype=torch.bfloat16))
    optimizer = Muon([small, large, empty], lr=1e-4, ns_dtype="fp32", **NEAREST)
    optimizer.param_groups[0]["lr_factors"] = [*factors, 1.0]
    grads = [normal(16, 16).bfloat16(), normal(64, 64).bfloat16() if has_gradient else None, torch.zeros_like(empty)]
    run(optimizer, [small, large, empty], [grads])
    assert caplog.text.count("[weights-cannot-move]") == warnings


def test_a_group_that_is_added_before_a_step_without_gradients_is_stepped_later():
    first, second = parameters()[:2]
    optimizer = Muon([first])
    run(optimizer, [first], [gradients(steps=1)[0][:1]])
    optimizer.add_param_group({"params": [second], "use_muon": True})
    run(optimizer, [first, second], [[None, None], gradients(steps=1)[0][:2]])
    assert [group["step"] for group in optimizer.param_groups] == [3, 2]


def test_moments_begin_anew_if_the_steps_of_groups_do_too():
    """As for a new stage of a training, or ReLoRA."""
    ours, grads = parameters(), gradients()
    optimizer = Muon(ours, lr=0.02)
    run(optimizer, ours, grads[:2])
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["step"] = 0
    run(optimizer, ours, grads[2:])
    run(Muon(theirs, lr=0.02), theirs, grads[2:])
    assert equal(ours, theirs)


def test_an_optimizer_does_not_keep_parameters_that_left_it():
    (param,) = parameters()[:1]
    optimizer = Muon([param])
    run(optimizer, [param], [gradients(steps=1)[0][:1]])
    left = weakref.ref(param)
    optimizer.param_groups.clear()
    optimizer.state.clear()
    optimizer.zero_grad()
    del param
    gc.collect()
    assert left() is None


class Reads(TorchFunctionMode):
    """Count how often one of some tensors is read."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors, self.count = set(map(id, tensors)), 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        is_read = function in {Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__bool__, Tensor.__int__}
        self.count += is_read and id(args[0]) in self.tensors
        return function(*args, **(kwargs or {}))


def test_a_rate_on_a_device_is_read_once_in_a_step():
    """Each read waits for the device."""
    params = [torch.nn.Parameter(torch.ones(8, 8)), torch.nn.Parameter(torch.ones(8))]
    groups = [{"params": [param], "use_muon": param.ndim == 2, "lr": torch.tensor(0.1)} for param in params]
    optimizer = Muon(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        with Reads(group[key] for group in optimizer.param_groups for key in ("lr", "initial_lr")) as reads:
            optimizer.step()
        scheduler.step()
        assert reads.count == 2 * len(groups)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.025)


def test_options_are_checked_when_they_have_changed(monkeypatch):
    optimizer = Muon([torch.nn.Parameter(torch.ones(8, 8))])
    checked = Mock(side_effect=step_plan.hyperparameter_complaint)
    monkeypatch.setattr(step_plan, "hyperparameter_complaint", checked)
    values = iter(
        [("nesterov", True), ("nesterov", False), ("momentum", 0.5), ("momentum", numpy.float32(0.5)), ("lr", 0)]
    )
    for count, (name, value) in enumerate(values):
        optimizer.param_groups[0][name] = value
        for _ in range(2):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(8, 8)
            optimizer.step()
        assert checked.call_count == [1, 2, 3, 3, 4][count]
    optimizer.param_groups[0]["momentum"] = numpy.float32(2.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"momentum=.*2\.0"):
            optimizer.step()


@pytest.mark.parametrize("value", [UserList([1.0, math.nan, 1.0]), {"a", "set"}], ids=["a list of others", "no list"])
def test_an_option_of_another_type_is_refused_when_it_changes_to_a_wrong_value(value):
    """Two values of such a type may have one text."""
    optimizer = Muon([torch.nn.Parameter(torch.ones(8, 8))], ns_coefficients=(1.0, 1.0, 1.0))
    (group,) = optimizer.param_groups
    kind = type(value)
    group["ns_coefficients"] = UserList([3.0, -4.0, 2.0]) if kind is UserList else (3.0, -4.0, 2.0)
    group["params"][0].grad = torch.ones(8, 8)
    optimizer.step()
    before = group["params"][0].detach().clone()
    for _ in range(2):
        group["ns_coefficients"] = value
        with pytest.raises(RuntimeError, match="ns_coefficients"):
            optimizer.step()
    assert torch.equal(group["params"][0], before)


@pytest.mark.parametrize(("group", "name"), [(0, "momentum"), (0, "weight_rounding"), (1, "adamw_betas")])
def test_a_group_that_has_lost_an_option_is_refused_and_nothing_moves(group, name):
    optimizer, params = both_halves()
    run(optimizer, params, both_gradients(1))
    before = [param.detach().clone() for param in params]
    del optimizer.param_groups[group][name]
    with pytest.raises(RuntimeError, match=rf"{name}=None is not valid.*\[invalid-value\]"):
        run(optimizer, params, both_gradients(1))
    assert all(torch.equal(param, start) for param, start in zip(params, before, strict=True))
