"""`weight_decay_mode: cautious`: weights decay only where the step moves them towards zero.

Source: Chen et al., https://arxiv.org/abs/2510.12402.
"""

from __future__ import annotations

from torch import Tensor

from hf_muon.config import OPTIONS
from hf_muon.rules.rule import Options, Rule, States


def with_decay(directions: Tensor, weights: Tensor, state: States, options: Options, step: int, scale: float) -> Tensor:
    """Return directions with the decay of those weights that have the sign of their direction, or where it is zero."""
    # The step multiplies directions by lr * scale, and decays by lr.
    decay = weights * (options["weight_decay"] / scale)
    moved: Tensor = directions + decay.masked_fill_(directions * weights < 0, 0.0)
    return moved


RULE = Rule(
    name="weight_decay_mode",
    options={"weight_decay_mode": OPTIONS["weight_decay_mode"]},
    is_on=lambda options: options["weight_decay_mode"] == "cautious",
    apply=with_decay,
    decays=True,
)
