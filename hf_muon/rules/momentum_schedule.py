"""`momentum_warmup` and `momentum_cooldown`: momentum that rises over the first steps and falls over the last.

Source: Jordan et al., https://github.com/KellerJordan/modded-nanogpt, whose steps, ends and `LOW` these are;
https://github.com/karpathy/nanochat warms up from 0.85 and ends at 0.90.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from hf_muon.options import types
from hf_muon.options.declaration import Option
from hf_muon.rules.rule import Options, Rule

_SOURCE = (
    "[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), [nanochat](https://github.com/karpathy/nanochat)"
)
LOW = 0.85
"""Momentum at the ends of both."""


def momentum(options: Options, step: int) -> dict[str, float]:
    """Return the momentum of a step: the smaller one where warmup and cooldown overlap."""
    warmup, cooldown = options["momentum_warmup"], options["momentum_cooldown"]
    high = options["momentum"]
    rise = min((step - 1) / warmup, 1.0) if warmup else 1.0
    fall = 1.0
    if cooldown and options["training_steps"] is not None:  # a plan may not know it; steps are refused
        fall = min(max((options["training_steps"] - (step - 1)) / cooldown, 0.0), 1.0)
    fraction = min(rise, fall)
    return {"momentum": high if fraction == 1.0 else LOW + fraction * (high - LOW)}


def complaint(options: Options) -> str | None:
    """Say why momentum cannot rise."""
    if options["momentum"] < LOW:
        return (
            f"momentum={options['momentum']} is below {LOW}, where momentum_warmup starts and momentum_cooldown ends: "
            "leave both out, or raise momentum"
        )
    return None


def step_complaint(options: Options) -> str | None:
    """Say that the end of the training is not known."""
    if options["momentum_cooldown"] and options["training_steps"] is None:
        return (
            f"momentum_cooldown={options['momentum_cooldown']} counts from the end of the training, which is not known "
            "here: set training_steps to the number of optimizer steps"
        )
    return None


def fill_training_steps(group: MutableMapping[str, Any], steps: int) -> None:
    """Tell a param group that needs it how many steps the training has, unless its user has said so."""
    if group.get("momentum_cooldown") and group.get("training_steps") is None:
        group["training_steps"] = steps


RULE = Rule(
    name="momentum_schedule",
    options={
        "momentum_warmup": Option(
            types.integer("a number of steps, 0 for none", 0),
            0,
            "Number of first steps over which momentum rises linearly from 0.85 to `momentum`; 0 for none.",
            scope="group",
            source=_SOURCE,
        ),
        "momentum_cooldown": Option(
            types.integer("a number of steps, 0 for none", 0),
            0,
            "Number of last steps over which momentum falls linearly from `momentum` to 0.85; 0 for none. "
            "Needs `training_steps`, which a Trainer fills in.",
            scope="group",
            source="[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt)",
        ),
        "training_steps": Option(
            types.integer("a positive number of steps", 1),
            None,
            "Number of optimizer steps of the whole training, from which `momentum_cooldown` counts.",
            scope="group",
            fallback="Trainer's own number",
        ),
    },
    is_on=lambda options: bool(options["momentum_warmup"] or options["momentum_cooldown"]),
    hyperparameters=momentum,
    complaint=complaint,
    step_complaint=step_complaint,
)
