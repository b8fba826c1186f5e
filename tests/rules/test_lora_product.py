"""`lora: product`: pairs of factors against a slow loop, with factors of another scale, and in layouts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from hf_muon import Muon, build_optimizer
from hf_muon.math.coefficients import resolve
from hf_muon.rules.lora_product import inverse_root
from tests.distributed.test_layouts import assert_equal
from tests.reference import newton_schulz_on_singular_values
from tests.rules.lora_cases import given, muon, named, weights_of
from tests.rules.lora_models import adapted_model
from tests.rules.slow import symmetric_root

LR, DECAY, STEPS = 0.02, 0.5, 10


def parameters(shapes, **options):
    return {name: nn.Parameter(w) for name, w in weights_of(shapes, **options).items()}


def gradients(shapes, steps=STEPS, seed=50):
    return [weights_of(shapes, seed=seed + step) for step in range(steps)]


def run(optimizer, params, all_grads):
    for grads in all_grads:
        for name, param in params.items():
            param.grad = grads[name].clone()
        optimizer.step()
    return params


def slow(weights, all_grads, *, lr=LR, decay=DECAY, beta=0.95):
    """Step pairs as the paper writes it, in float64, and plain matrices as plain Muon."""
    weights = {name: w.double() for name, w in weights.items()}
    buffers = {name: torch.zeros_like(w) for name, w in weights.items()}
    steps = resolve("polar_express", 5)
    for grads in all_grads:
        before = dict(weights)
        for name, weight in before.items():
            buffers[name] = beta * buffers[name] + (1 - beta) * grads[name].double()
            update = beta * buffers[name] + (1 - beta) * grads[name].double()
            if "lora" not in name:
                scale = 0.2 * math.sqrt(max(weight.shape))
                direction = newton_schulz_on_singular_values(update, steps)
                weights[name] = (1 - lr * decay) * weight - lr * scale * direction
                continue
            a, b = (before[name.replace("lora_A", f"lora_{x}").replace("lora_B", f"lora_{x}")] for x in "AB")
            scale, split = 0.2 * math.sqrt(max(len(b), a.shape[1])), math.sqrt(1 - lr * decay)
            if "lora_B" in name:
                root = symmetric_root(a)
                move = newton_schulz_on_singular_values(update @ root, steps) @ root
            else:
                root = symmetric_root(b.T)
                move = root @ newton_schulz_on_singular_values(root @ update, steps)
            weights[name] = split * weight - lr * scale / 2 * move / split
    return weights


@pytest.mark.parametrize("zero", [False, True], ids=["any", "zero"])
def test_ten_steps_are_those_of_the_paper(zero):
    for seed in range(3):
        sizes = torch.randint(6, 40, (4, 2), generator=torch.Generator().manual_seed(seed)).tolist()
        shapes = named([(rows, 2 + k, columns) for k, (rows, columns) in enumerate(sizes)])
        start, grads = weights_of(shapes, seed, zero), gradients(shapes, seed=50 * seed + 9)
        expected = slow(start, grads)
        params = parameters(shapes, seed=seed, zero=zero)
        run(muon(params), params, grads)
        plain = parameters(shapes, seed=seed, zero=zero)
        run(muon(plain, lora_product=False), plain, grads)
        for name, one in expected.items():
            moved = (one - start[name]).norm()
            assert (params[name].detach().double() - one).norm() < 1e-3 * moved, name
            if "lora" in name:
                assert (plain[name].detach().double() - one).norm() > 1e-2 * moved, "plain Muon is as near"
            else:
                assert torch.equal(params[name], plain[name]), name


def test_a_zero_factor_starts_to_move_and_its_partner_waits():
    shapes = named()
    params = parameters(shapes, zero=True)
    before = {name: param.detach().clone() for name, param in params.items()}
    run(muon(params, weight_decay=0.0), params, gradients(shapes, 1))
    for name, param in params.items():
        assert torch.equal(param, before[name]) is ("lora_A" in name)
        assert param.isfinite().all()


@pytest.mark.parametrize("kind", ["any", "badly scaled"])
def test_the_product_does_not_depend_on_the_factors(kind):
    """For B S^-1 and S A, gradients are G_B S^T and S^-T G_A, and every step moves the product alike."""
    pairs = [(12, 3, 20), (9, 4, 15)]
    shapes = named(pairs, [])
    start, grads = weights_of(shapes), gradients(shapes, 5)
    changes = {}
    for k, (_, rank, _) in enumerate(pairs):
        generator = torch.Generator().manual_seed(k)
        random = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
        scales = torch.logspace(-3, 3, rank, dtype=torch.float64).diag()
        changes[f"layers.{k}"] = scales if kind == "badly scaled" else random

    def changed(tensors, *, gradient):
        result = {}
        for name, tensor in tensors.items():
            s = changes[name[: len("layers.0")]]
            s = s.inverse().T if gradient else s
            result[name] = (s @ tensor.double() if "lora_A" in name else tensor.double() @ s.inverse()).float()
        return result

    mine = {name: nn.Parameter(w.clone()) for name, w in start.items()}
    theirs = {name: nn.Parameter(w) for name, w in changed(start, gradient=False).items()}
    run(muon(mine), mine, grads)
    run(muon(theirs), theirs, [changed(step, gradient=True) for step in grads])
    for k in range(len(pairs)):
        products = [
            (p[f"layers.{k}.lora_B.default.weight"] @ p[f"layers.{k}.lora_A.default.weight"]).detach()
            for p in (mine, theirs, start)
        ]
        assert (products[0] - products[1]).norm() < 2e-3 * (products[0] - products[2]).norm()


def test_inverse_roots():
    rows = torch.randn(3, 4, 9, dtype=torch.float64) * torch.logspace(-6, 6, 4, dtype=torch.float64)[:, None]
    rows[1, 2] = 0
    rows[2, 3] = rows[2, 0]
    roots = inverse_root(rows)
    for x, root in zip(rows, roots, strict=True):
        gram = x @ x.T
        scale = gram.diagonal().sqrt().clamp(min=1e-300)
        projector = (root.T @ gram @ root).round(decimals=6)  # onto what the rows span
        assert torch.linalg.matrix_rank(x / scale[:, None]) == projector.trace()
        assert (projector @ projector - projector).abs().max() < 1e-6
    assert not inverse_root(torch.zeros(2, 3, 5, dtype=torch.float64)).any()
    assert inverse_root(torch.full((2, 3, 5), torch.nan, dtype=torch.float64)).isnan().all()


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp", 2), ("last", 2), ("hsdp", 4), ("fsdp-tp", 4)])
def test_given_equal_gradients_every_layout_gives_the_bits_of_one_process(pools, layout, ranks):
    for options in ({}, {"dtype": "bfloat16"}, {"momentum_dtype": "bf16", "weight_decay_schedule": "lr"}):
        assert_equal(pools[ranks].run(given, layout=layout, **options), given(0, "single", **options))


def test_resume_is_exact_and_a_run_switches_on_and_off():
    shapes = named()
    params, grads = parameters(shapes), gradients(shapes, 6)
    optimizer = muon(params)
    run(optimizer, params, grads[:3])
    others = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    resumed, state = muon(others), copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"][0]["lora_product"] is True
    resumed.load_state_dict(state)
    off = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    plain = muon(off, lora_product=False)
    plain.load_state_dict(state)
    assert plain.param_groups[0]["lora_product"] is False
    for each, own in ((optimizer, params), (resumed, others), (plain, off)):
        run(each, own, grads[3:])
    assert all(torch.equal(params[name], others[name]) for name in params)
    assert not any(torch.equal(params[name], off[name]) for name in params if "lora" in name)


def test_factors_of_the_rate_are_those_of_the_rate():
    shapes = named([(12, 3, 20)], [])
    halves, half = parameters(shapes), parameters(shapes)
    group = {"params": list(halves.items()), "lr_factors": [0.5, 0.5]}
    of_factors = Muon([group], lr=LR, weight_decay=DECAY, lora_product=True, ns_dtype="fp32")
    run(of_factors, halves, gradients(shapes, 3))
    run(muon(half, lr=LR / 2), half, gradients(shapes, 3))
    assert all(torch.equal(halves[name], half[name]) for name in shapes)


def test_adapters_of_a_model_are_trained():
    adapted = adapted_model(modules_to_save=["norm"])
    optimizer = build_optimizer(adapted, lora="product", lr=1e-2, weight_decay=0.1)
    assert [(g["use_muon"], g["lora_product"]) for g in optimizer.param_groups] == [(True, True), (False, False)]
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(30):
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    assert all(param.isfinite().all() for param in adapted.parameters())
