"""Rules as users would write them: NorMuon again, one at every point with state of every kind, examples."""

from __future__ import annotations

import contextlib

from examples.rules import bimaxwell, sinkhorn
from hf_muon import config
from hf_muon.rules import Option, Rule, register, registry, types


def rows_normalized(updates, orthogonalize, state, options, step):
    directions = orthogonalize(updates)
    beta = options["their_beta"]
    moment = state["their_moment"]
    moment.copy_(moment + (directions.square().mean(dim=-1, keepdim=True) - moment) * (1 - beta))
    normalized = directions / (moment.sqrt() + 1e-10)
    return normalized * (directions.norm(dim=(-2, -1), keepdim=True) / normalized.norm(dim=(-2, -1), keepdim=True))


NORMUON = Rule(
    name="their_normuon",
    options={
        "their_normalize": Option(types.flag(), False, "Normalize rows."),
        "their_beta": Option(types.number("a number from 0 to below 1", 0, 1), 0.95, "Decay."),
    },
    is_on=lambda options: options["their_normalize"],
    state={"their_moment": "row"},
    direction=rows_normalized,
)


def scaled(updates, grads, weights, state, options, step):
    state["their_squares"].lerp_(grads.float().square(), 0.1)
    return (updates / (state["their_squares"].sqrt() + 0.1) + 0.01 * weights).to(updates.dtype)


def rows_weighted(updates, orthogonalize, state, options, step):
    norms = updates.norm(dim=-1, keepdim=True)
    directions = orthogonalize(updates / (norms + norms.mean(dim=-2, keepdim=True) + 1e-30))
    state["their_rows"].add_(directions.abs().mean(dim=-1, keepdim=True))
    state["their_count"].add_(1)
    return directions * state["their_rows"].rsqrt() * state["their_count"]


def pulled(directions, weights, state, options, step, scale):
    state["their_pull"].mul_(0.5).add_(weights)
    return directions + 0.01 * state["their_pull"] / scale


EVERYWHERE = Rule(
    name="their_everything",
    options={"their_everything": Option(types.flag(), False, "Change a step everywhere.")},
    is_on=lambda options: options["their_everything"],
    state={"their_squares": "weight", "their_pull": "weight", "their_rows": "row", "their_count": "row"},
    hyperparameters=lambda options, step: {"momentum": 0.8 + 0.01 * step, "weight_decay": options["weight_decay"] / 2},
    update=scaled,
    direction=rows_weighted,
    apply=pulled,
)
EXAMPLES = [module.RULE for module in (bimaxwell, sinkhorn)]
RULES = {"their_normalize": NORMUON, "their_everything": EVERYWHERE}


@contextlib.contextmanager
def registered():
    """Register the rules, and forget them: processes of a pool run other tests, too."""
    tables = registry.RULES, config.OPTIONS, config.GROUP_OPTIONS, config.MUON_OPTIONS
    before = [dict(table) for table in tables]
    for rule in (*RULES.values(), *EXAMPLES):
        register(rule)
    try:
        yield RULES
    finally:
        for table, own in zip(tables, before, strict=True):
            table.clear()
            table.update(own)
