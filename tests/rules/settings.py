"""The options that switch each rule on."""

SETTINGS = {
    "normalize": {"normalize": "rows"},
    "cautious": {"weight_decay_mode": "cautious"},
}
