"""`bimaxwell`: momentum that mixes a fast and a slow average of gradients.

Until the step `bimaxwell` both averages are the usual one, so that the switch does not move the update. The fast one is
Muon's own momentum; the slow one is stored beside it, 4 bytes a weight. Source: bi-Maxwell momentum,
https://github.com/KellerJordan/modded-nanogpt/pull/340, whose numbers these are.
"""

import torch

from hf_muon.rules import Option, Rule, types

FAST, SLOW = 0.85, 0.98
SHARE_OF_FAST = 0.4385
AHEAD = 0.95  # the share of the average in an update, the rest of which is the gradient


def momentum(options, step):
    """Return the decay of Muon's own average, and that it does not look ahead."""
    return {"momentum": FAST if step >= options["bimaxwell"] else options["momentum"], "nesterov": False}


def mixed(fast, grads, weights, state, options, step):
    """Return updates from both averages and the gradient; elementwise."""
    slow, grads = state["slow_momentum"], grads.to(fast.dtype)
    slow.lerp_(grads, 1 - (SLOW if step >= options["bimaxwell"] else options["momentum"]))
    return torch.lerp(grads, torch.lerp(slow, fast, SHARE_OF_FAST), AHEAD)


RULE = Rule(
    name="bimaxwell",
    options={"bimaxwell": Option(types.integer("a step, 0 for none", 0), 0, "The first step with two averages.")},
    is_on=lambda options: options["bimaxwell"] > 0,
    state={"slow_momentum": "weight"},
    hyperparameters=momentum,
    update=mixed,
)
