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
from hf_muon.optimizer.layout import lines_of
from hf_muon.routing.route import table
from hf_muon.storage.factors import factors_of
from tests.distributed import training
from tests.optimizer.cases import REST, SHAPES, gradients, parameters, run

LR = [0.5, 1.0, 2.0, 0.0, 0.25, 1.0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.proj(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.final_norm = nn.Embedding(40, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(16, 40, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


def net():
    torch.manual_seed(0)
    return Net()


def factors(**options):
    return {route.name: route.factor for route in route_parameters(net(), **options)}


# --- steps


@pytest.mark.parametrize("shapes", [SHAPES, REST], ids=["muon", "adamw"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float64, {}),
        (torch.float32, {"weight_decay_mode": "cautious"}),
        (torch.bfloat16, {"adamw_state_dtype": "bf16"}),
    ],
    ids=str,
)
def test_factors_step_like_groups_with_other_rates(shapes, dtype, options):
    options, use_muon = {"lr": 0.25, "weight_decay": 0.5, **options}, shapes is SHAPES
    start, grads = parameters(shapes, dtype), gradients(shapes, 6, dtype)
    one, other = parameters(shapes, dtype), parameters(shapes, dtype)
    run(Muon([{"params": one, "use_muon": use_muon, "lr_factors": LR[: len(one)]}], **options), one, grads)
    groups = [{"params": [p], "lr": 0.25 * f, "use_muon": use_muon} for p, f in zip(other, LR, strict=False)]
    run(Muon(groups, **options), other, grads)
    assert all(map(torch.equal, one, other))
    assert list(map(torch.equal, one, start)) == [factor == 0 for factor in LR[: len(one)]]


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


def test_groups_stay_as_they_are_and_parameters_alone_have_the_factors_of_their_model(caplog):
    scales, model = r"embed:0.5|layers\.0\.proj:0.25", net()
    with caplog.at_level(logging.INFO):
        scaled = build_optimizer(model, weight_decay=0.1, lr_scales=scales)
    assert "lr x 0.25 to 1" in caplog.text
    assert " x " not in table(route_parameters(model))
    alone = MuonOfGroups(model.parameters(), model=model, lr_scales=scales)
    for optimizer in (scaled, alone):
        found = {
            name: factor
            for group in optimizer.param_groups
            for name, factor in zip(group["param_names"], factors_of(group), strict=True)
        }
        assert found == factors(lr_scales=scales)
    for one, other in zip(scaled.param_groups, build_optimizer(model, weight_decay=0.1).param_groups, strict=True):
        assert (one["param_names"], one["lr"]) == (other["param_names"], other["lr"])
        assert other["lr_factors"] is None


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
    lines = [tuple(lines_of(build_optimizer(net(), lr_scales=s).param_groups)) for s in ("embed:2", "embed:3", None)]
    assert len(set(lines)) == 3
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
        return optimizer.diagnostics.pop_summary()["muon/relative_update"]

    assert relative(lr_scales="proj.weight:0.5") == pytest.approx(relative() / 2, rel=1e-4)
