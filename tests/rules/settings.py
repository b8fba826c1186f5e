"""The options that switch each rule on."""

SETTINGS = {
    "momentum_schedule": {"momentum_warmup": 2, "momentum_cooldown": 3, "training_steps": 6},
    "normalize": {"normalize": "rows"},
    "cautious": {"weight_decay_mode": "cautious"},
}
