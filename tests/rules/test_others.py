"""Rules of users: registered, seen in metrics, and resumed.

`tests.equality` steps them in every layout.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch

from hf_muon import Muon, MuonConfig, build_optimizer, route_parameters
from hf_muon.optim_args import parse_optim_args
from hf_muon.plan import facts_of, numbers_of
from hf_muon.rules import Option, Rule, register, registry, types
from tests.integrations.plain_script import model
from tests.integrations.trainer_runs import train
from tests.optimizer.cases import gradients, parameters, run
from tests.rules import others


@pytest.fixture
def rules():
    """Register the rules of `others`, and forget them."""
    with others.registered() as rules:
        yield rules


@pytest.mark.promise("own-rule")
def test_normuon_of_others_is_ours(rules):
    ours, theirs, grads = parameters(), parameters(), gradients()
    run(Muon(ours, normalize="rows"), ours, grads)
    run(Muon(theirs, their_normalize=True), theirs, grads)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(ours, theirs, strict=True))


def test_options_are_read_as_those_of_muon_are(rules):
    config = MuonConfig.from_mapping(parse_optim_args("their_normalize=true,their_beta=0.5,momentum=0.9"))
    assert config.rules == {"their_normalize": True, "their_beta": 0.5}
    optimizer = build_optimizer(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)), config)
    assert optimizer.param_groups[0]["their_beta"] == 0.5


def test_a_run_of_trainer_with_a_registered_rule_resumes_exactly(rules, tmp_path):
    """Name the rule in `optim_args`, train, save and resume."""
    options = {"optim_args": "their_everything=true", "save_strategy": "steps", "save_steps": 3}
    plain, whole, resumed = model(), model(), model()
    train(plain, tmp_path / "plain")
    train(whole, tmp_path, **options)
    train(resumed, tmp_path / "on", resume=str(tmp_path / "checkpoint-3"), **options)
    assert not torch.equal(plain.model.layers[0].mlp.up_proj.weight, whole.model.layers[0].mlp.up_proj.weight)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_rule_that_is_registered_later_is_off_in_older_groups():
    weights, grads = parameters(), gradients(steps=2)
    optimizer = Muon(weights)
    run(optimizer, weights, grads[:1])
    with others.registered():
        optimizer.param_groups[0]["momentum"] = 0.9  # so that all options are checked again
        run(optimizer, weights, grads[1:])
        copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


def test_state_moves_once_where_another_rule_orthogonalizes_twice(rules):
    """The rule with state is asked first, whenever it was registered."""
    twice = Rule(
        name="their_twice",
        options={"their_twice": Option(types.flag(), False, "Orthogonalize twice.")},
        is_on=lambda options: options["their_twice"],
        direction=lambda updates, orthogonalize, *rest: orthogonalize(updates + orthogonalize(updates.clone())),
    )
    register(twice)
    registry.RULES["normalize"] = registry.RULES.pop("normalize")
    weights, (grads,) = parameters(), gradients(steps=1)
    optimizer = Muon(weights, their_twice=True, normalize="rows", ns_coefficients="polar_express", ns_steps=10)
    run(optimizer, weights, [grads])
    for weight in weights:
        moment = optimizer.state[weight]["row_second_moment"]
        # An orthogonal direction (m, n) has a squared norm of min(m, n).
        total = 0.05 * min(weight.shape) / weight.size(1)
        assert float(moment.sum()) == pytest.approx(total, rel=0.05)


def test_a_plan_counts_the_state_of_rules(rules):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 4))
    configs = [MuonConfig.from_mapping(own) for own in ({}, {"their_everything": True})]
    run = {"layout": "fsdp", "ranks": 2, "dtype": torch.bfloat16}
    plain, ruled = (numbers_of(facts_of(model, route_parameters(model), own, **run)).state for own in configs)
    like_weights, by_row = 6 * 8 + 6 * 6 + 4 * 6, 6 + 6 + 4
    assert sum(ruled) - sum(plain) == 2 * 4 * (like_weights + 2 * by_row), "two of each in fp32; rows on both ranks"


# --- options that rules change from step to step are measured


def lines_of(path, **options):
    weights = parameters()
    optimizer = Muon(weights, lr=0.1, weight_decay=0.25, diagnostics_every=2, diagnostics_file=str(path), **options)
    run(optimizer, weights, gradients(steps=2))
    return list(map(json.loads, path.read_text().splitlines()))


def test_options_that_rules_change_are_measured(rules, tmp_path):
    _, line = lines_of(tmp_path / "d.jsonl", their_everything=True)
    assert (line["muon_momentum"], line["muon_weight_decay"]) == (pytest.approx(0.82), 0.125)


@pytest.mark.parametrize(
    ("options", "momentum"), [({}, None), ({"momentum_warmup": 4, "normalize": "rows"}, 0.85 + 0.1 / 4)]
)
def test_a_schedule_of_hf_muons_own_is_measured_where_there_is_one(options, momentum, tmp_path):
    _, line = lines_of(tmp_path / "d.jsonl", **options)
    assert line.get("muon_momentum") == (momentum and pytest.approx(momentum))
