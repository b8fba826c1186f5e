"""`momentum_warmup`: momentum that rises over the first steps.

Source: Jordan et al., https://github.com/KellerJordan/modded-nanogpt, whose steps and `LOW` these are.
"""

from __future__ import annotations

from hf_muon.config import OPTIONS
from hf_muon.rules.rule import Options, Rule

LOW = 0.85
"""Momentum of the first step."""


def momentum(options: Options, step: int) -> dict[str, float]:
    """Return the momentum of a step."""
    fraction = min((step - 1) / options["momentum_warmup"], 1.0)
    high = options["momentum"]
    return {"momentum": high if fraction == 1.0 else LOW + fraction * (high - LOW)}


def complaint(options: Options) -> str | None:
    """Return why momentum cannot rise; None if it can."""
    if options["momentum"] < LOW:
        return (
            f"momentum={options['momentum']} is below {LOW}, where momentum_warmup starts: leave it out, or raise "
            "momentum [momentum-below-warmup]"
        )
    return None


RULE = Rule(
    name="momentum_schedule",
    options={"momentum_warmup": OPTIONS["momentum_warmup"]},
    is_on=lambda options: bool(options["momentum_warmup"]),
    hyperparameters=momentum,
    complaint=complaint,
)
