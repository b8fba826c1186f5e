"""`weight_decay_schedule: lr`: weight decay follows the schedule of the learning rate, so that weights settle.

A step shrinks weights by ``lr * weight_decay * lr / peak``, with the peak of the schedule. Source: Defazio,
https://arxiv.org/abs/2506.02285 (AdamC). Codes that shrink by ``lr * lr * weight_decay`` need another `weight_decay`
for every peak. The paper leaves layers that no normalization follows at constant decay; here every group follows.
"""

from __future__ import annotations

from hf_muon.options import types
from hf_muon.options.declaration import Option
from hf_muon.rules.rule import Options, Rule

PEAKS = ("initial_lr", "max_lr")
"""Where torch's schedulers keep the rate of a group before any schedule, and the largest one of a cycle."""


def weight_decay(options: Options, step: int) -> dict[str, float]:
    """Return the weight decay of a step; as it is where no scheduler has written its peak into the group."""
    rate = max(float(options["lr"]), 0.0)
    peak = max((float(options[key]) for key in PEAKS if key in options), default=rate)
    if not peak or rate == peak:
        return {}
    return {"weight_decay": options["weight_decay"] * (rate / peak)}


RULE = Rule(
    name="weight_decay_schedule",
    options={
        "weight_decay_schedule": Option(
            types.choice(("constant", "lr")),
            "constant",
            "Schedule of the weight decay, of Muon and AdamW groups: `constant`, or `lr`, which multiplies it by the "
            "learning rate over the peak of the schedule.",
            scope="group",
            source="[2506.02285](https://arxiv.org/abs/2506.02285)",
        )
    },
    is_on=lambda options: options["weight_decay_schedule"] == "lr",
    hyperparameters=weight_decay,
    adamw=True,
)
