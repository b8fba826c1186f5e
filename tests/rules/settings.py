"""The options that switch each rule on."""

SETTINGS = {
    "momentum_schedule": {"momentum_warmup": 2, "momentum_cooldown": 3, "training_steps": 6},
    "normalize": {"normalize": "rows"},
    "cautious": {"weight_decay_mode": "cautious"},
}
TOGETHER = {name: value for options in SETTINGS.values() for name, value in options.items()}
"""Every rule that goes with all others."""
