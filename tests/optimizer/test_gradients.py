"""A step refuses gradients and options that it cannot compute with, before it changes weights or moments."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from hf_muon.optimizer.gradients import largest
from hf_muon.storage.tensors import STEPPED_DTYPES

LARGEST = torch.finfo(torch.float32).max


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def stepped(dtype=torch.float32, **options):
    model = net(dtype)
    optimizer = build_optimizer(model, lr=0.01, **options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


def assert_refused(model, optimizer, message):
    weights = [param.detach().clone() for param in model.parameters()]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=message) as error:
        optimizer.step()
    assert "weights and moments are as they were" in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    after = optimizer.state_dict()
    assert [group["step"] for group in after["param_groups"]] == [group["step"] for group in before["param_groups"]]
    for i, state in before["state"].items():
        assert all(torch.equal(value, after["state"][i][key]) for key, value in state.items())


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_large_gradients_of_changing_sign_are_refused_or_keep_weights_finite(momentum_dtype, nesterov):
    for size in (LARGEST, 2e38, 1e38, LARGEST / 4, 1e37):
        weight = nn.Parameter(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))
        optimizer = Muon([weight], nesterov=nesterov, momentum_dtype=momentum_dtype)
        for sign in (1, -1, -1, 1):
            weight.grad = torch.full((4, 32), sign * size)
            try:
                optimizer.step()
            except RuntimeError as error:
                assert size > LARGEST / 4
                assert "parameter 0 (4, 32) has a gradient as large as" in str(error)  # noqa: PT017
            assert weight.isfinite().all()
            assert all(moment.float().isfinite().all() for moment in optimizer.state.get(weight, {}).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("adamw_state_dtype", ["auto", "fp32", "bf16"])
def test_adamw_moments_stay_finite_up_to_the_limit(dtype, adamw_state_dtype):
    """Refuse gradients whose second moment is infinite in torch's AdamW: such a weight would never move again."""
    weight = nn.Parameter(torch.randn(6, dtype=dtype))
    optimizer = Muon([{"params": [weight], "use_muon": False}], adamw_state_dtype=adamw_state_dtype)
    limit = largest(optimizer.param_groups[0], weight)
    for sign in (1, -1, 1):
        weight.grad = torch.full((6,), sign * limit * 0.98, dtype=dtype)
        optimizer.step()
    assert all(moment.isfinite().all() for moment in optimizer.state[weight].values())
    weight.grad = torch.full((6,), 1.02 * limit, dtype=dtype)
    with pytest.raises(RuntimeError, match="has a gradient as large as"):
        optimizer.step()


def test_large_gradients_that_a_step_can_take_are_taken():
    """Accept gradients whose sum of squares overflows: the moments stay finite."""
    weight = nn.Parameter(torch.zeros(300, 300))
    optimizer = Muon([weight], lr=0.1)
    weight.grad = torch.full((300, 300), 8e37)
    optimizer.step()
    assert weight.isfinite().all()
    assert weight.any()


@pytest.mark.parametrize("where", ["0.weight", "1.bias", "2.weight"])
def test_finite_gradients_that_are_too_large_name_their_parameter(where):
    model, optimizer = stepped()
    dict(model.named_parameters())[where].grad.view(-1)[0] = 3e38
    assert_refused(model, optimizer, rf"{where} \(.*\) has a gradient as large as 3e\+38; above .* would overflow")


def mixed(param, dtype):
    param.grad = None
    param.grad_dtype = None  # newer torch accepts any dtype then
    param.grad = torch.randn(param.shape).to(dtype)


one_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has one dtype for both")


@one_dtype
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int32])
@pytest.mark.parametrize("name", ["0.weight", "0.bias"])
def test_gradients_of_a_dtype_that_cannot_be_stepped(name, dtype):
    model, optimizer = stepped(torch.bfloat16)
    mixed(dict(model.named_parameters())[name], dtype)
    message = rf"{name} \(7.*\) has a gradient of dtype {dtype}; Muon and AdamW take float32, "
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@one_dtype
@pytest.mark.parametrize("weights", STEPPED_DTYPES)
@pytest.mark.parametrize("gradients", STEPPED_DTYPES)
def test_adamw_takes_gradients_of_another_dtype(weights, gradients):
    """Equal torch's AdamW in fp32, or fp64, with the gradients converted and the weights rounded after each step."""
    start = torch.randn(8, 1000).to(weights)
    computed = torch.promote_types(weights, torch.float32)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.to(computed))
    options = {"lr": 0.01, "weight_decay": 0.1}
    group = {"params": [ours], "use_muon": False, "adamw_betas": (0.9, 0.999)}
    optimizer, adamw = Muon([group], weight_rounding="nearest", **options), torch.optim.AdamW([theirs], **options)
    for _ in range(3):
        mixed(ours, gradients)
        theirs.grad = ours.grad.to(computed)
        optimizer.step()
        adamw.step()
        theirs.data = theirs.data.to(weights).to(computed)
        assert torch.equal(ours.to(computed), theirs)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[ours][key], adamw.state[theirs][key])


@one_dtype
def test_muon_takes_gradients_of_another_dtype_as_they_are():
    """Add an fp32 gradient of bf16 weights to the fp32 momentum without rounding."""
    (weight,), twin = (nn.Parameter(torch.zeros(5, 7, dtype=torch.bfloat16)) for _ in range(1)), None
    twin = nn.Parameter(torch.zeros(5, 7))
    mixed(weight, torch.float32)
    twin.grad = weight.grad.clone()
    ours, theirs = Muon([weight]), Muon([twin])
    ours.step()
    theirs.step()
    assert torch.equal(ours.state[weight]["momentum_buffer"], theirs.state[twin]["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.complex64])
@pytest.mark.parametrize("use_muon", [True, False])
def test_parameters_of_dtypes_that_cannot_be_stepped(dtype, use_muon):
    param = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    with pytest.raises(RuntimeError, match=rf"parameter 0 \(4, 4\) has dtype {dtype} .* dense tensors in float32"):
        Muon([{"params": [param], "use_muon": use_muon}])


@pytest.mark.parametrize("lr", [float("nan"), -1.0, float("inf")])
def test_a_tensor_is_checked_like_a_number(lr):
    weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"lr=tensor\(.*\) is not valid. Valid: a number of at least 0"):
        Muon([weight], lr=torch.tensor(lr))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", float("nan")),
        ("lr", -1.0),
        ("lr", torch.tensor(float("nan"))),
        ("lr", torch.tensor(-1.0)),
        ("lr", None),
        ("weight_decay", float("inf")),
        ("momentum", 1.5),
        ("adamw_betas", (0.9, 1.0)),
        ("adamw_eps", -1e-8),
        ("ns_steps", 0),
    ],
)
@pytest.mark.parametrize("group", [0, 1])
def test_options_that_were_changed_on_the_way(name, value, group):
    """Refuse invalid values that a scheduler, a hook or a user has written into `param_groups`."""
    model, optimizer = stepped()
    optimizer.param_groups[group][name] = value
    assert_refused(model, optimizer, rf"{name}=.* is not valid")


@pytest.mark.parametrize("lr", [numpy.float32(0.01), numpy.float64(0.01), numpy.int64(1), 1, torch.tensor(0.01)])
def test_a_schedule_may_write_numbers_of_any_kind(lr):
    model, optimizer = stepped()
    twin, other = stepped()
    optimizer.param_groups[0]["lr"], other.param_groups[0]["lr"] = lr, float(lr)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("form", [float, torch.tensor])
def test_a_schedule_may_end_a_rounding_error_below_zero(form):
    """Accept the slightly negative last rate of LinearLR, as torch's AdamW does; the run also resumes."""
    weight = nn.Parameter(torch.ones(3, 3))
    theirs = nn.Parameter(torch.ones(3))
    ours = nn.Parameter(torch.ones(3))
    optimizer = Muon([{"params": [weight]}, {"params": [ours], "use_muon": False}], lr=form(1e-3), ns_dtype="fp32")
    adamw = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.0)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, end_factor=0.0) for o in (optimizer, adamw)]
    for _ in range(8):
        for param in (weight, ours, theirs):
            param.grad = torch.ones_like(param)
        for each in (optimizer, adamw, *schedules):
            each.step()
    assert -1e-12 < optimizer.param_groups[0]["lr"] < 0
    assert torch.allclose(ours, theirs)
    before = weight.detach().clone()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.0, 0.0], abs=1e-12)
    optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("lr", [-4.4e-21, -1e-12, 0.0])
@pytest.mark.parametrize("form", [float, torch.tensor])
def test_a_rate_that_a_schedule_rounds_below_zero_is_zero(lr, form):
    """Leave weights of zero as they are, which the tiniest rate would move."""
    params = [nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3))]
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])
    for group in optimizer.param_groups:
        group["lr"] = form(lr)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not any(param.any() for param in params)


@pytest.mark.parametrize("lr", [-4.4e-21, -1e-12, -1e-8])
@pytest.mark.parametrize("form", [float, torch.tensor])
def test_a_negative_rate_is_refused(lr, form):
    param = nn.Parameter(torch.ones(3, 3))
    for muon in (
        lambda: Muon([param], lr=form(lr)),
        lambda: Muon([{"params": [param], "lr": form(lr)}]),
        lambda: build_optimizer(nn.Linear(3, 3), {"lr": form(lr)}),
    ):
        with pytest.raises(ValueError, match=r"lr=.* is not valid. Valid: a number of at least 0"):
            muon()


@pytest.mark.parametrize("lr", [-1.1e-12, -1e-8])
def test_a_negative_rate_of_a_schedule_is_refused(lr):
    model, optimizer = stepped()
    optimizer.param_groups[0]["lr"] = lr
    assert_refused(model, optimizer, r"lr=.* is not valid. Valid: a number of at least 0")


@pytest.mark.parametrize("size", [300, torch.finfo(torch.float16).max])
@pytest.mark.parametrize("shape", [(6,), (3, 40), (300, 500)])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_every_finite_fp16_gradient_is_taken(size, shape, contiguous, foreach):
    """Step where moments in fp16, as those of torch's AdamW, become infinite: they equal those of fp32 weights."""

    def parameter(dtype):
        whole = torch.ones(2 * shape[0], *shape[1:], dtype=dtype)
        return nn.Parameter(whole[: shape[0]] if contiguous else whole[::2])

    ours, theirs = parameter(torch.float16), parameter(torch.float32)
    optimizer = Muon([{"params": [ours], "use_muon": False}], lr=1e-3)
    adamw = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.0, foreach=foreach)
    for sign in (1, -1, -1, -1, 1):
        for param in (ours, theirs):
            param.grad = torch.full_like(param, sign * size)
        optimizer.step()
        adamw.step()
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[ours][key].isfinite().all()
        assert torch.equal(optimizer.state[ours][key], adamw.state[theirs][key])
