"""What `lora: product` does not step is refused by name, before a weight moves."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import nn

from hf_muon import Muon, MuonOfGroups, build_optimizer
from hf_muon.integrations.deepspeed.refusals import refuse_momentum
from hf_muon.rules.lora_product import partner
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import assert_equal
from tests.rules.factors import Factors
from tests.rules.lora_cases import given_on_stand_in, muon, named, on_the_host, weights_of
from tests.rules.lora_models import (
    adapted_model,
    with_adalora,
    with_adapted_convolution,
    with_adapted_experts,
)

PREFIX = "base_model.model."


@contextlib.contextmanager
def refused(params, *words, error=ValueError):
    """Expect an error that has all words, in their order, and leaves parameters as they were."""
    params = list(params)
    before = [param.detach().clone() for param in params]
    with pytest.raises(error, match=".*".join(map(re.escape, words))):
        yield
    assert all(torch.equal(param, own) for param, own in zip(params, before, strict=True))


def parameters(shapes):
    return {name: nn.Parameter(w) for name, w in weights_of(shapes).items()}


def frozen(part):
    adapted = adapted_model()
    for name, param in adapted.named_parameters():
        if part in name:
            param.requires_grad_(False)
    return adapted


# --- models


OTHER_PRODUCTS = "belongs to factors whose product is not lora_B times lora_A", "Use lora=muon"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_adalora, ("model.layers.0.self_attn.q_proj.lora_E.default ", *OTHER_PRODUCTS)),
        (with_adapted_experts, ("model.layers.0.mlp.experts.lora_A.default.weight ", *OTHER_PRODUCTS)),
        (
            with_adapted_convolution,
            (
                "conv.lora_A.default.weight (4, 8, 3, 3) is seen as 'flat', and lora_product takes single matrices",
                "use lora=muon",
            ),
        ),
    ],
)
def test_factors_that_are_no_pair_of_matrices(make, words):
    model = make()
    with refused(model.parameters(), PREFIX + words[0], *words[1:]):
        build_optimizer(model, lora="product")
    optimizer = build_optimizer(model, lora="muon")  # as the sentence says
    for param in model.parameters():
        param.grad = torch.randn_like(param) if param.requires_grad else None
    optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: frozen("lora_B"), {}, ("q_proj.lora_A.default.weight (4, 32) has no partner", "q_proj.lora_B")),
        (lambda: frozen("lora_A"), {}, ("q_proj.lora_B.default.weight (32, 4) has no partner", "q_proj.lora_A")),
        (adapted_model, {"adamw_patterns": "v_proj.lora_A"}, ("v_proj.lora_B.default.weight (16, 4) has no partner",)),
    ],
)
def test_factors_whose_partner_muon_does_not_train(make, options, words):
    model = make()
    advice = "in its param group, and lora_product steps the two together: train both, by Muon, in one group, or use"
    with refused(model.parameters(), *words, advice):
        build_optimizer(model, lora="product", **options)


def test_partners_in_another_group_as_lora_plus_has_them():
    model = adapted_model()
    pairs = [[p for n, p in model.named_parameters() if part in n] for part in ("lora_A", "lora_B")]
    with refused(model.parameters(), "lora_A.default.weight", "train both, by Muon, in one group"):
        MuonOfGroups([{"params": own} for own in pairs], model=model, lora="product")


def test_a_model_without_factors_for_muon():
    model = frozen("lora_")
    with refused(model.parameters(), "lora=product: no LoRA factor is trained. Remove the option, or check the peft"):
        build_optimizer(model, lora="product")
    model = adapted_model(r=1)
    with refused(model.parameters(), "x single row or column. Name matrices with muon_patterns, or choose another"):
        build_optimizer(model, lora="product")
    with pytest.raises(ValueError, match=r"Only LoRA factors are trained: set lora=muon"):
        build_optimizer(adapted_model())


# --- names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m.q_proj.lora_A.default.weight", ("m.q_proj.lora_B.default.weight", "lora_A")),
        ("m.lora_B.weight", ("m.lora_A.weight", "lora_B")),
        ("m.lora_a.weight", ("m.lora_b.weight", "lora_A")),
        ("m.lora_b.weight", ("m.lora_a.weight", "lora_B")),
        ("m.lora_embedding_A.default", ("m.lora_embedding_B.default", "lora_A")),
        ("lora_unet_up.lora_down.weight", ("lora_unet_up.lora_up.weight", "lora_A")),
        ("m.lora.up.weight", ("m.lora.down.weight", "lora_B")),
        ("m.q_proj.weight", None),
        ("m.flora_A.weight", None),
        ("m.lora_magnitude_vector.default.weight", None),
    ],
)
def test_partners_by_name(name, expected):
    assert partner(name) == expected


@pytest.mark.parametrize("names", [("lora_down", "lora_up"), ("lora_a", "lora_b")])
def test_names_of_other_packages(names):
    optimizer = build_optimizer(nn.ModuleList([Factors(*names)]), lora="product")
    assert optimizer.param_groups[0]["lora_product"]


@pytest.mark.parametrize("names", [("lora_left", "lora_right"), ("lora_mid", "lora_up")])
def test_names_that_are_not_known(names):
    """Refuse them beside known ones too: plain Muon does not take their place."""
    model = nn.ModuleList([Factors("lora_A", "lora_B"), Factors(*names)])
    words = f"1.{names[0]}.weight is named as a LoRA factor, and none of lora_A with lora_B", "or use lora=muon"
    with refused(model.parameters(), *words):
        build_optimizer(model, lora="product")
    with refused(model.parameters(), *words):
        Muon([(n, p) for n, p in model.named_parameters() if p.requires_grad and p.ndim == 2], lora_product=True)


# --- param groups


def test_groups_without_pairs():
    params = parameters(named([(6, 2, 5)], []))
    with refused(params.values(), "knows the two matrices of a pair by their names, which this param group lacks"):
        Muon(list(params.values()), lora_product=True)
    plain = parameters(named([], [(4, 5)]))
    with refused(plain.values(), "lora_product=true: this Muon group has no LoRA factors. Leave it out, or write"):
        muon(plain)
    other = {**params, "layers.0.lora_A.default.weight": nn.Parameter(torch.zeros(3, 5))}
    with refused(other.values(), "lora_B (6, 2) times lora_A (3, 5) is no product of matrices. Use lora=muon"):
        muon(other)
    with refused(params.values(), "is seen as 'transposed', and lora_product takes single matrices: use lora=muon"):
        Muon([{"params": list(params.items()), "views": ["transposed", ""]}], lora_product=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "rows"}, "lora_product and normalize each make the directions of whole matrices"),
        ({"weight_decay_mode": "cautious"}, "weight_decay_mode and lora_product each take care of weight decay"),
        ({"lr": 2.0}, "lr=2 times weight_decay=0.5 is not below 1: lower one of them"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    params = parameters(named())
    with refused(params.values(), message):
        muon(params, **options)


def test_a_name_that_is_lost_before_a_step():
    params = parameters(named())
    optimizer = muon(params)
    for param in params.values():
        param.grad = torch.ones_like(param)
    del optimizer.param_groups[0]["param_names"]
    words = "Muon refuses this step; weights and moments are as they were:\n  - lora_product knows the two matrices of"
    with refused(params.values(), words, error=RuntimeError):
        optimizer.step()
    assert not optimizer.state


# --- layouts


def test_partitions():
    optimizer = muon(parameters(named()))
    refuse_momentum(optimizer, {"zero_optimization": {"stage": 0}})
    for stage in (1, 2, 3):
        words = f"lora_product (lora=product) needs whole factors, and ZeRO-{stage} cuts matrices anywhere. Use ZeRO-0"
        with refused([], words, error=RuntimeError):
            refuse_momentum(optimizer, {"zero_optimization": {"stage": stage}})
    group = optimizer.param_groups[0]
    group["params"] = [nn.Parameter(torch.zeros(100))]
    group["params"][0].grad = torch.ones(100)
    with refused(group["params"], "ZeRO-1, 2, 3 cuts matrices anywhere", error=RuntimeError):
        optimizer.step()


@pytest.fixture(scope="module")
def stand_ins():
    """Yield a pool of two ranks with the stand-in for an accelerator."""
    pool = Pool(2, forks=True)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
def test_cpu_offload_of_fsdp2(stand_ins, is_late):
    words = (
        "layers.0.lora_A.default.weight (3, 20) is stored on the cpu, away from its ranks' devices, and lora_product "
        "gathers whole factors: leave out the CPU offload of FSDP2, or use lora=muon"
    )
    head = "RuntimeError: Muon refuses this step; weights and moments are as they were:\n  - " if is_late else ""
    for error, is_kept in stand_ins.run(on_the_host, is_late=is_late):
        assert (head or "ValueError: ") + words in error
        assert is_kept


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_momentum_offload_is_not_refused(stand_ins, layout):
    """Compare with a run without: the same bits, in the order of the device's streams."""
    expected = stand_ins.run(given_on_stand_in, layout="single")[0][0]
    for states, races, copied in stand_ins.run(given_on_stand_in, layout=layout, momentum_offload="cpu"):
        assert_equal([states], expected)
        assert not races
        assert min(copied.values()) > 0
