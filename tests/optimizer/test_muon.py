from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_muon import Muon, orthogonalize
from hf_muon.config import GROUP_OPTIONS
from hf_muon.math.adamw import CHUNK
from hf_muon.math.coefficients import PRESETS, resolve
from tests.held import Held
from tests.reference import ReferenceMuon, moved, relative_difference

SHAPES = [(24, 24), (40, 16), (16, 40), (24, 24), (61, 7), (40, 16)]
# A bias, an embedding and a norm, as the AdamW half sees them.
REST = [(40,), (100, 16), (16,)]


def parameters(shapes=SHAPES, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(shapes=SHAPES, steps=10, dtype=torch.float32, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(steps)]


def run(optimizer, params, all_grads):
    for grads in all_grads:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    return params


def both_halves(dtype=torch.float32, **options):
    matrices, rest = parameters(dtype=dtype), parameters(REST, dtype=dtype)
    optimizer = Muon([{"params": matrices}, {"params": rest, "use_muon": False}], **options)
    return optimizer, matrices + rest


def both_gradients(steps=6, dtype=torch.float32, seed=2):
    return gradients(SHAPES + REST, steps, dtype, seed)


class TestAgainstTorch:
    """torch.optim.Muon computes in bf16; given fp32 products, it is the same rule."""

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
@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original", "rms_to_rms"])
def test_ten_steps_against_the_reference(preset, nesterov, adjust_lr_fn):
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    start, ours = parameters(), parameters()
    reference = ReferenceMuon(start, steps=resolve(preset, 5), **options)
    run(Muon(ours, ns_coefficients=preset, ns_dtype="fp32", **options), ours, gradients())
    for grads in gradients():
        reference.step(grads)
    # The steps of cans cancel larger terms than the others' and amplify fp32 rounding more.
    assert relative_difference(start, reference.params, ours) < (2e-5 if preset == "cans" else 1e-5)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
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
def test_half_precision_parameters_follow_the_fp32_run(dtype):
    """The momentum is fp32 and each step rounds the weights once, so that the weights stay within a rounding a step."""
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
    """Equal shapes are stacked; each must come back to its own parameter."""
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
    """Newton-Schulz must not write into the buffer, of which the update is an alias without nesterov."""
    params = parameters()
    optimizer = Muon(params, nesterov=nesterov)
    run(optimizer, params, gradients(steps=3))
    for i, param in enumerate(params):
        expected = torch.zeros(SHAPES[i])
        for grads in gradients(steps=3):
            expected = 0.95 * expected + 0.05 * grads[i]
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], expected)


def test_closure():
    """The gradients of the closure are the ones that are stepped, and its loss is returned."""
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


def test_add_param_group_equals_having_had_it():
    late = parameters([(8, 12)], seed=7)
    optimizer, params = both_halves(lr=0.02)
    optimizer.add_param_group({"params": late, "lr": 0.1, "momentum": 0.5})
    run(optimizer, params + late, gradients(SHAPES + REST + [(8, 12)], 3))
    alone = parameters([(8, 12)], seed=7)
    grads = [[step[-1]] for step in gradients(SHAPES + REST + [(8, 12)], 3)]
    run(Muon(alone, lr=0.1, momentum=0.5), alone, grads)
    assert torch.equal(late[0], alone[0])


def test_copies_and_pickles_step_alike():
    optimizer, params = both_halves()
    run(optimizer, params, both_gradients(2))
    twin = copy.deepcopy(optimizer)
    twin_params = [p for group in twin.param_groups for p in group["params"]]
    run(optimizer, params, both_gradients(2, seed=9))
    run(twin, twin_params, both_gradients(2, seed=9))
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))


@pytest.mark.parametrize("name", GROUP_OPTIONS)
def test_param_groups_carry_every_hyperparameter(name):
    optimizer, _ = both_halves()
    assert all(name in group and "use_muon" in group for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ([(4,)], {}, r"parameter 0 \(4,\) is not a matrix"),
        ([(4, 4), (2, 3, 4, 5)], {}, r"parameter 1 \(2, 3, 4, 5\) is not a matrix"),
        ([(4, 4)], {"lr": -1.0}, r"lr=-1.0 is not valid. Valid: a number of at least 0"),
        ([(4, 4)], {"lr": float("nan")}, "lr=nan is not valid"),
        ([(4, 4)], {"lr": torch.ones(2)}, "is not valid"),
        ([(4, 4)], {"weight_decay": -0.1}, "weight_decay=-0.1 is not valid"),
        ([(4, 4)], {"momentum": 1.0}, "momentum=1.0 is not valid. Valid: a number from 0 to below 1"),
        ([(4, 4)], {"nesterov": 1}, "nesterov=1 is not valid. Valid: true or false"),
        ([(4, 4)], {"ns_steps": 0}, "ns_steps=0 is not valid"),
        ([(4, 4)], {"ns_coefficients": "cans", "ns_steps": 6}, "at most 5 steps"),
        ([(4, 4)], {"ns_dtype": "fp16"}, "does not run on a CPU"),
        ([(4, 4)], {"adjust_lr_fn": "none"}, "Valid: match_rms_adamw, original or rms_to_rms"),
        ([(4, 4)], {"adamw_betas": (0.9, 1.0)}, "adamw_betas="),
    ],
)
def test_bad_arguments(params, options, message):
    with pytest.raises(ValueError, match=message):
        Muon(parameters(params), **options)


def test_unknown_group_key_lists_the_valid_ones_and_adds_nothing():
    optimizer, _ = both_halves()
    with pytest.raises(ValueError, match=r"'betas' is not an option of muon.*Valid: params, use_muon, views, lr"):
        optimizer.add_param_group({"params": parameters([(3, 3)]), "betas": (0.9, 0.9)})
    with pytest.raises(ValueError, match="is not a matrix"):
        optimizer.add_param_group({"params": parameters([(3,)])})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 3, len(SHAPES) + 1])
def test_non_finite_gradients_are_refused_and_nothing_moves(bad, where):
    optimizer, params = both_halves()
    run(optimizer, params, both_gradients(2))
    weights = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict())
    grads = both_gradients(1, seed=8)[0]
    grads[where].view(-1)[0] = bad
    with pytest.raises(RuntimeError, match="refuses this step; weights and moments are as they were") as error:
        run(optimizer, params, [grads])
    assert str(tuple(params[where].shape)) in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(params, weights, strict=True))
    after = optimizer.state_dict()["state"]
    for i, saved in state["state"].items():
        assert all(torch.equal(value, after[i][key]) for key, value in saved.items())


def test_gradients_may_be_so_large_that_their_squares_are_infinite():
    (first, second), (param, twin) = gradients([(40, 30)], 1)[0] * 2, parameters([(40, 30)]) + parameters([(40, 30)])
    run(Muon([param], ns_dtype="fp32"), [param], [[first]])
    run(Muon([twin], ns_dtype="fp32"), [twin], [[second * 2.0**100]])
    assert torch.equal(param, twin)


def test_complaints_name_the_parameters():
    named = [(f"layer.{i}.weight", p) for i, p in enumerate(parameters())]
    optimizer = Muon(named)
    grads = gradients(steps=1)[0]
    grads[1][0, 0] = grads[4][0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"(?s)layer.1.weight.*layer.4.weight"):
        run(optimizer, [p for _, p in named], [grads])


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Muon([{"params": embedding.parameters(), "use_muon": False}])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient; build its embedding with sparse=False"):
        optimizer.step()


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


def test_sharded_parameters_are_refused_with_what_to_do():
    flat = nn.Parameter(torch.randn(4, 4))
    flat._is_flat_param = True
    with pytest.raises(RuntimeError, match=r"flat FSDP1 parameter.*Muon needs FSDP2"):
        Muon([flat])
    partitioned = nn.Parameter(torch.randn(4, 4))
    partitioned.ds_id = 1
    optimizer = Muon([partitioned])  # before DeepSpeed wraps it
    with pytest.raises(RuntimeError, match="partitioned by DeepSpeed ZeRO-3, and stepped without it"):
        optimizer.step()


def test_unreduced_dtensors_are_refused_also_when_swapped_in_later():
    """accelerate's FSDP2 puts DTensors into the groups of an optimizer that was built over plain parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        partial = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Partial()]))
        with pytest.raises(RuntimeError, match=r"is a DTensor with placement P.* Redistribute it first"):
            Muon([partial])
        optimizer = Muon(parameters([(4, 4)]))
        optimizer.param_groups[0]["params"][0] = partial
        partial.grad = torch.zeros_like(partial)
        with pytest.raises(RuntimeError, match=r"refuses this step.*\n.*is a DTensor with placement P"):
            optimizer.step()
        sharded = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
        optimizer.param_groups[0]["params"][0] = sharded
        sharded.grad = torch.randn(4, 4)
        with pytest.raises(RuntimeError, match="is a DTensor, and its gradient a plain tensor"):
            optimizer.step()
    finally:
        torch.distributed.destroy_process_group()


def test_a_complaint_of_one_group_leaves_the_others_as_they_were():
    optimizer, params = both_halves()
    run(optimizer, params, both_gradients(1))
    before = [p.detach().clone() for p in params]
    buffer = optimizer.state[params[0]]["momentum_buffer"].clone()
    grads = both_gradients(1)[0]
    params[-1].data = torch.zeros(3)
    grads[-1] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"its exp_avg has shape \(16,\). The parameter was resized"):
        run(optimizer, params, [grads])
    optimizer.param_groups[0]["ns_dtype"] = "fp16"
    with pytest.raises(RuntimeError, match=r"does not run on a CPU[\s\S]*its exp_avg has shape"):
        run(optimizer, params, [grads])
    assert all(torch.equal(a, b) for a, b in zip(params[:-1], before, strict=False))
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], buffer)


def test_empty_matrices_are_left_alone():
    params = parameters([(0, 4), (4, 4)])
    run(Muon(params), params, gradients([(0, 4), (4, 4)], 2))
    twin = parameters([(4, 4)])
    torch.testing.assert_close(params[1].shape, twin[0].shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_holds_no_more_than_it_may(dtype):
    """Whatever the number of parameters; and what goes one after the other comes to the same."""
    shapes = [(64, 128)] * 12 + [(16, 48, 32), (400, 500), (160, 40)]
    rest = [(3000, 100), (7,)]
    results = []
    # The largest matrix takes 4.9 MB by itself.
    for limit in (1, 5_000_000):  # a matrix at a time, and units of several
        params, others = parameters(shapes, dtype), parameters(rest, dtype)
        groups = [{"params": params}, {"params": others, "use_muon": False}]
        optimizer = Muon(groups, ns_dtype="fp32", max_batch_bytes=limit)
        grads = [[grad.to(dtype) for grad in step] for step in gradients(shapes + rest, 2)]
        run(optimizer, params + others, grads[:1])
        for param, grad in zip(params + others, grads[1], strict=True):
            param.grad = grad
        with Held() as held:
            optimizer.step()
        assert held.peak < max(limit, 5_000_000)
        results.append(params)
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_int8_momentum_is_read_matrix_by_matrix():
    (param,), (grad,) = parameters([(16384, 256)]), gradients([(16384, 256)], 1)[0]
    optimizer = Muon([{"params": [param], "views": ["rows 256x64"]}], ns_dtype="fp32", momentum_dtype="int8")
    run(optimizer, [param], [[grad]])
    param.grad = grad
    with Held() as held:
        optimizer.step()
    assert held.peak < 4 * param.numel()


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


class TestStateDict:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_resume_is_bit_exact(self, dtype):
        optimizer, params = both_halves(dtype, lr=0.02, weight_decay=0.1)
        run(optimizer, params, both_gradients(3, dtype))
        file = io.BytesIO()
        torch.save({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
        run(optimizer, params, both_gradients(3, dtype, seed=4))

        file.seek(0)
        saved = torch.load(file, weights_only=True)
        resumed, resumed_params = both_halves(dtype)
        with torch.no_grad():
            for param, weight in zip(resumed_params, saved["weights"], strict=True):
                param.copy_(weight)
        resumed.load_state_dict(saved["optimizer"])
        run(resumed, resumed_params, both_gradients(3, dtype, seed=4))
        assert all(torch.equal(a, b) for a, b in zip(params, resumed_params, strict=True))
        for a, b in zip(params, resumed_params, strict=True):
            for key, value in optimizer.state[a].items():
                assert torch.equal(value, resumed.state[b][key])

    def test_dropped_moments_would_show(self):
        """The comparison above fails when the moments do not come back."""
        optimizer, params = both_halves(lr=0.02)
        run(optimizer, params, both_gradients(3))
        fresh, fresh_params = both_halves(lr=0.02)
        with torch.no_grad():
            for a, b in zip(fresh_params, params, strict=True):
                a.copy_(b)
        run(optimizer, params, both_gradients(3, seed=4))
        run(fresh, fresh_params, both_gradients(3, seed=4))
        assert moved(params, fresh_params) > 1e-2

    @pytest.mark.parametrize("saved_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_momentum_is_fp32_whatever_the_checkpoint_held(self, dtype, saved_dtype):
        optimizer, params = both_halves(dtype)
        run(optimizer, params, both_gradients(2, dtype))
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            for key in state:
                if key != "step":
                    state[key] = state[key].to(saved_dtype)
        resumed, resumed_params = both_halves(dtype)
        resumed.load_state_dict(saved)
        for i, param in enumerate(resumed_params):
            if i < len(SHAPES):
                buffer = resumed.state[param]["momentum_buffer"]
                assert buffer.dtype == torch.float32
                assert torch.equal(buffer, saved["state"][i]["momentum_buffer"].float())
            else:
                assert resumed.state[param]["exp_avg"].dtype == dtype
        run(resumed, resumed_params, both_gradients(1, dtype))

    def test_loading_shares_no_memory_with_the_checkpoint(self):
        optimizer, params = both_halves()
        run(optimizer, params, both_gradients(1))
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved)
        twin, twin_params = both_halves()
        twin.load_state_dict(saved)
        run(twin, twin_params, both_gradients(2))
        for i, state in before["state"].items():
            assert all(torch.equal(value, saved["state"][i][key]) for key, value in state.items())

    def test_parameters_cast_after_loading(self):
        """accelerate's FSDP2 casts bf16 parameters to fp32 after the optimizer was built."""
        optimizer, params = both_halves(torch.bfloat16)
        run(optimizer, params, both_gradients(1, torch.bfloat16))
        for param in params:
            param.grad = None
            param.data = param.data.float()
        run(optimizer, params, both_gradients(1))
        assert all(p.dtype == torch.float32 for p in params)
        assert all(v.dtype == torch.float32 for s in optimizer.state.values() for v in s.values())

    def test_init_state_equals_lazy_state(self):
        eager, eager_params = both_halves()
        lazy, lazy_params = both_halves()
        eager.init_state()
        assert len(eager.state) == len(eager_params)
        run(eager, eager_params, both_gradients(2))
        run(lazy, lazy_params, both_gradients(2))
        assert all(torch.equal(a, b) for a, b in zip(eager_params, lazy_params, strict=True))

    def test_state_before_the_first_step(self):
        optimizer, params = both_halves()
        fresh, _ = both_halves()
        optimizer.load_state_dict(fresh.state_dict())
        run(optimizer, params, both_gradients(1))

    def test_options_of_the_checkpoint_win_and_that_is_said(self, caplog):
        optimizer, params = both_halves(momentum=0.9, lr=0.5)
        run(optimizer, params, both_gradients(1))
        fresh, _ = both_halves(ns_steps=6)
        fresh.load_state_dict(optimizer.state_dict())
        assert fresh.param_groups[0]["momentum"] == 0.9
        assert "win over those of this run" in caplog.text
        assert "momentum 0.9, not 0.95; ns_steps 5, not 6" in caplog.text
        caplog.clear()
        fresh.load_state_dict(optimizer.state_dict())
        assert not caplog.text

    def test_users_pre_hook_comes_first(self):
        optimizer, params = both_halves()
        run(optimizer, params, both_gradients(1))
        renamed = optimizer.state_dict()
        for state in renamed["state"].values():
            if "momentum_buffer" in state:
                state["momentum"] = state.pop("momentum_buffer")

        def rename(_, state_dict):
            for state in state_dict["state"].values():
                if "momentum" in state:
                    state["momentum_buffer"] = state.pop("momentum")

        fresh, _ = both_halves()
        with pytest.raises(ValueError, match=r"lacks \['momentum_buffer'\]"):
            fresh.load_state_dict(renamed)
        fresh.register_load_state_dict_pre_hook(rename)
        fresh.load_state_dict(renamed)
        assert all(fresh.state[p] for group in fresh.param_groups for p in group["params"])


class TestRefusedCheckpoints:
    """Each is refused by a message that says what is wrong, and the optimizer stays as it was."""

    @staticmethod
    def named(shapes=SHAPES, prefix="layers", use_muon=True):
        return {"params": [(f"{prefix}.{i}", p) for i, p in enumerate(parameters(shapes))], "use_muon": use_muon}

    def stepped(self, *groups):
        optimizer = Muon(list(groups) or [self.named(), self.named(REST, "rest", False)])
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        return optimizer

    def refused(self, state_dict, message, optimizer=None):
        optimizer = optimizer or self.stepped()
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=message) as error:
            optimizer.load_state_dict(state_dict)
        assert "nothing was changed" in str(error.value)
        after = optimizer.state_dict()
        assert before["param_groups"] == after["param_groups"]
        for i, state in before["state"].items():
            assert all(torch.equal(value, after["state"][i][key]) for key, value in state.items())

    @pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
    def test_another_optimizer(self, name):
        cls = getattr(torch.optim, name, None) or pytest.skip(f"this torch has no {name}")
        self.refused(cls(parameters()).state_dict(), "written by another optimizer.*`use_muon` is not among them")

    def test_not_an_optimizer(self):
        self.refused({"model": 1}, r"not an optimizer's state_dict: its keys are \['model'\]")

    def test_another_number_of_parameters(self):
        fewer = self.stepped(self.named(SHAPES[:3]), self.named(REST, "rest", False))
        self.refused(
            fewer.state_dict(), r"does not have layers.3, layers.4, layers.5 \(6 parameters, this optimizer 9\)"
        )
        self.refused(self.stepped().state_dict(), "which this optimizer does not train", fewer)

    def test_another_number_of_parameters_without_names(self):
        optimizer, params = both_halves()
        run(optimizer, params, both_gradients(1))
        other = Muon(parameters())
        self.refused(optimizer.state_dict(), "9 parameters in groups of 6 Muon .* 3 AdamW, this optimizer has 6", other)

    def test_another_routing(self):
        moved_one = self.stepped(self.named(SHAPES[:-1]), self.named(REST, "rest", False))
        extra = {"params": [("layers.5", parameters([SHAPES[-1]])[0])], "use_muon": False}
        moved_one.add_param_group(extra)
        self.refused(moved_one.state_dict(), r"the routing changed for layers.5 \(AdamW there\)")

    def test_another_order(self):
        swapped = self.named()
        swapped["params"].reverse()
        optimizer = self.stepped(swapped, self.named(REST, "rest", False))
        self.refused(optimizer.state_dict(), "in another order, and state is matched by position")

    def test_another_shape(self):
        other = self.named()
        other["params"][2] = ("layers.2", nn.Parameter(torch.randn(5, 5)))
        optimizer = self.stepped(other, self.named(REST, "rest", False))
        self.refused(optimizer.state_dict(), r"layers.2 \(16, 40\): its momentum_buffer has shape \(5, 5\)")

    @pytest.mark.parametrize(("index", "key"), [(1, "momentum_buffer"), (len(SHAPES), "exp_avg")])
    def test_missing_moments(self, index, key):
        state_dict = self.stepped().state_dict()
        del state_dict["state"][index][key]
        self.refused(state_dict, f"moments are missing: .* lacks \\['{key}'\\]")

    def test_half_of_the_state(self):
        state_dict = self.stepped().state_dict()
        del state_dict["state"][0]
        self.refused(state_dict, "moments are missing: layers.0")

    @pytest.mark.parametrize(("option", "value"), [("ns_dtype", "fp8"), ("momentum", 2.0), ("adamw_betas", (0.9,))])
    def test_options_that_are_not_valid(self, option, value):
        state_dict = self.stepped().state_dict()
        state_dict["param_groups"][0][option] = value
        self.refused(state_dict, f"one of its param groups has {option}=.* is not valid")

    def test_moments_that_are_not_finite(self):
        state_dict = self.stepped().state_dict()
        state_dict["state"][1]["momentum_buffer"][0, 0] = float("nan")
        self.refused(state_dict, r"layers.1 \(40, 16\): its momentum_buffer is not finite")

    def test_all_complaints_at_once(self):
        state_dict = self.stepped().state_dict()
        del state_dict["state"][0]
        state_dict["state"][3]["momentum_buffer"] = torch.zeros(2, 2)
        self.refused(state_dict, r"(?s)layers.3 \(24, 24\): its momentum_buffer.*moments are missing: layers.0")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_adamw_half_is_torchs_fused_kernel(dtype):
    ours = [nn.Parameter(p.detach().cuda()) for p in parameters(REST, dtype)]
    theirs = [nn.Parameter(p.detach().cuda()) for p in parameters(REST, dtype)]
    grads = [[g.cuda() for g in step] for step in gradients(REST, 5, dtype)]
    run(Muon([{"params": ours, "use_muon": False}]), ours, grads)
    run(torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.0, fused=True), theirs, grads)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
