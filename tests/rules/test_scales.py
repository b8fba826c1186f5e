"""Factors of the learning rate: by name, in steps, and on resume."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import yaml
from torch import nn

from hf_muon import Muon, MuonConfig, MuonOfGroups, build_optimizer, route_parameters
from hf_muon.optim_args import parse_optim_args, text_of
from hf_muon.optimizer.layout_lines import lines_of
from hf_muon.routing.route import table
from tests.distributed import training
from tests.optimizer.cases import REST, both_gradients, gradients, parameters, run
from tests.rules.slow import SlowMuon

LR = [0.3, 1.0, 2.0, 0.0, 0.5, 1.0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.proj(x))


class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 16)
        self.final_norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.lm_head = nn.Linear(16, 40, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


def net(layers=3):
    torch.manual_seed(0)
    return Net(layers)


def factors(**options):
    return {route.name: route.factor for route in route_parameters(net(), **options)}


# --- steps


@pytest.mark.parametrize("mode", ["decoupled", "cautious"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrices_step_with_rates_of_their_own(mode, dtype):
    start, grads = parameters(dtype=dtype), gradients(steps=6, dtype=dtype)
    slow = [SlowMuon([w], lr=0.02 * f, weight_decay=0.5) for w, f in zip(start, LR, strict=True)]
    for own in slow if mode == "cautious" else []:
        own.decay = lambda weight, direction: torch.where(weight * direction >= 0, weight, 0)
    for step in grads:
        for own, grad in zip(slow, step, strict=True):
            own.step([grad])
    weights = parameters(dtype=dtype)
    group = {"params": weights, "lr_factors": LR}
    run(Muon([group], lr=0.02, weight_decay=0.5, weight_decay_mode=mode, ns_dtype="fp32"), weights, grads)
    for weight, own, first, factor in zip(weights, slow, start, LR, strict=True):
        error = float((weight.detach().double() - own.weights[0]).norm())
        assert error <= 1e-4 * float((own.weights[0] - first.detach().double()).norm())
        assert torch.equal(weight, first) is (factor == 0)


@pytest.mark.parametrize("options", [{}, {"adamw_state_dtype": "bf16"}], ids=str)
def test_adamw_steps_like_groups_with_other_rates(options):
    rest, grads = parameters(REST), gradients(REST, 6)
    group = {"params": rest, "use_muon": False, "lr_factors": [0.5, 2.0, 0.5]}
    run(Muon([group], lr=0.25, weight_decay=0.5, **options), rest, grads)
    others = parameters(REST)
    groups = [
        {"params": [p], "use_muon": False, "lr": 0.25 * f, "weight_decay": 0.5}
        for p, f in zip(others, group["lr_factors"], strict=True)
    ]
    run(Muon(groups, **options), others, grads)
    assert all(map(torch.equal, rest, others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_of_one_change_no_bit(dtype):
    results = []
    for ones in (False, True):
        matrices, rest = parameters(dtype=dtype), parameters(REST, dtype=dtype)
        groups = [{"params": matrices}, {"params": rest, "use_muon": False}]
        for group in groups if ones else []:
            group["lr_factors"] = [1.0] * len(group["params"])
        optimizer = Muon(groups, weight_decay=0.1)
        results.append(run(optimizer, matrices + rest, both_gradients(dtype=dtype)))
    assert all(map(torch.equal, *results))


def test_bf16_weights_have_their_factors():
    shapes = [(24, 24)]
    scaled, twice = parameters(shapes, torch.bfloat16), parameters(shapes, torch.bfloat16)
    grads = gradients(shapes, 4, torch.bfloat16)
    run(Muon([{"params": scaled, "lr_factors": [2.0]}], lr=0.02, weight_decay=0.5), scaled, grads)
    run(Muon(twice, lr=0.04, weight_decay=0.5), twice, grads)
    assert torch.equal(scaled[0], twice[0])


# --- from options to factors


def test_the_first_pattern_that_matches_counts():
    own = factors(lr_scales={"embed": 0.3, r"layers\.0\.proj": 0.5, "proj|head": 2})
    assert own["embed_tokens.weight"] == 0.3
    assert own["layers.0.proj.weight"] == 0.5
    assert own["layers.1.proj.weight"] == 2
    assert own["lm_head.weight"] == 2
    assert own["layers.1.norm.weight"] == 1


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"embed": 0.3, "norm|bias": 1, "head": 0.5}, "embed:0.3|norm|bias:1|head:0.5"),
        ({"a:b": 1e-05}, "a:b:1e-05"),
        ({"(?:x|y)z": 2}, "(?:x|y)z:2"),
        ({"x:1|y": 2}, "(?:x:1|y):2"),
    ],
)
def test_a_mapping_and_its_text_mean_the_same(mapping, text):
    assert text_of({"lr_scales": mapping}) == f"lr_scales={text}"
    (pairs,) = [MuonConfig.from_mapping(parse_optim_args(f"lr_scales={text}")).lr_scales]
    assert [factor for _, factor in pairs] == list(mapping.values())
    if "(?:x:1" not in text:
        assert MuonConfig(lr_scales=mapping).lr_scales == pairs == tuple(mapping.items())
    assert MuonConfig(lr_scales=pairs).lr_scales == pairs
    hash(MuonConfig(lr_scales=mapping))


def test_yaml_numbers_as_text():
    assert MuonConfig.from_mapping(yaml.safe_load("lr_scales: {embed: 1e-1}")).lr_scales == (("embed", 0.1),)


def test_groups_and_schedulers_stay_as_they_are(caplog):
    options = {"lr_scales": r"embed:0.5|layers\.0\.proj:0.25", "weight_decay": 0.1}
    with caplog.at_level(logging.INFO):
        scaled = build_optimizer(net(), **options)
    plain = build_optimizer(net(), weight_decay=0.1)
    for one, other in zip(scaled.param_groups, plain.param_groups, strict=True):
        assert one["param_names"] == other["param_names"]
        assert one["lr"] == other["lr"]
        assert other["lr_factors"] is None
    assert "lr x 0.25 to 1" in caplog.text
    assert " x " not in table(route_parameters(net()))


def test_parameters_alone_have_the_factors_of_their_model():
    model = net()
    optimizer = MuonOfGroups(model.parameters(), model=model, lr_scales="embed:0.5|proj:2")
    by_name = {
        name: factor
        for group in optimizer.param_groups
        for name, factor in zip(group["param_names"], group.get("lr_factors") or [1.0] * 99, strict=False)
    }
    assert by_name == factors(lr_scales="embed:0.5|proj:2")


# --- resume, ranks, metrics


def test_this_runs_factors_hold_on_resume(caplog):
    model = net()
    before = build_optimizer(model, lr_scales="embed:0.5|head:2")
    model(torch.arange(8)).square().mean().backward()
    before.step()
    state = copy.deepcopy(before.state_dict())
    after = build_optimizer(model, lr_scales="embed:0.25|head:3")
    caplog.clear()
    after.load_state_dict(state)
    assert "this run's lr_scales hold: " in caplog.text
    assert "embed_tokens.weight lr x 0.25, there 0.5" in caplog.text
    assert "lm_head.weight lr x 3, there 2" in caplog.text
    assert after.param_groups[1]["lr_factors"] == [0.25, 3.0]
    plain = build_optimizer(model)
    plain.load_state_dict(state)
    assert not any(group["lr_factors"] for group in plain.param_groups)
    caplog.clear()
    before.load_state_dict(state)
    assert "lr_scales" not in caplog.text
    for wrong in (["x"], "1.0|x", 3):
        state["param_groups"][1]["lr_factors"] = wrong
        with pytest.raises(ValueError, match=r"\[not-one-for-each\]"):
            before.load_state_dict(state)


def test_ranks_must_have_the_same_factors():
    lines = [
        list(lines_of(build_optimizer(net(), lr_scales=scales).param_groups)) for scales in ("embed:2", "embed:3", None)
    ]
    assert len(set(map(tuple, lines))) == 3
    assert lines[0][-1] == "embed_tokens.weight with the learning rate times 2.0"


@pytest.mark.first_tier("fsdp-tp|ddp")
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("fsdp-tp", 4)])
def test_names_are_those_of_the_model_in_every_layout(pools, layout, ranks):
    options = {"lr_scales": {r"^embed": 2.0, r"blocks\.0": 0.5, "qkv": 3.0}}
    expected = training.factors(0, "single", **options)
    assert set(expected.values()) == {0.5, 1.0, 2.0, 3.0}
    assert all(own == expected for own in pools[ranks].run(training.factors, layout=layout, **options))


def test_metrics_have_the_real_rates(tmp_path):
    def relative(**options):
        model = net()
        optimizer = build_optimizer(model, diagnostics_every=1, diagnostics_file=str(tmp_path / "x"), **options)
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        summary = optimizer.metrics.pop_summary()
        return summary["muon/relative_update"], summary

    (plain, _), (scaled, _) = relative(), relative(lr_scales="proj.weight:0.5")
    assert scaled == pytest.approx(plain / 2, rel=1e-4)
