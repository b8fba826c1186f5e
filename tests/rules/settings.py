"""The options that switch each rule on."""

SETTINGS = {
    "momentum_schedule": {"momentum_warmup": 2},
    "normalize": {"normalize": "rows"},
    "cautious": {"weight_decay_mode": "cautious"},
}
TOGETHER = {name: value for options in SETTINGS.values() for name, value in options.items()}
"""Every rule that goes with all others."""

TRIPLES = ((4.0, -7.0, 3.1), (3.5, -4.8, 2.0), (2.8, -3.0, 1.2))
PLAIN = {"update_rms": 0.3, "ns_coefficients": TRIPLES}
"""Options without state that change every step."""
OF_MODELS = {
    **SETTINGS,
    "lr_scales": {"lr_scales": {r"layers\.0\.": 0.5, "embed|lora_B": 2.0}},
    "update_rms": {"update_rms": 0.3},
    "list": {"ns_coefficients": TRIPLES},
    "deepseek_v4": {"ns_coefficients": "deepseek_v4"},
    "qk_clip": {"qk_clip": 1.0},
    "muon_b": {"lora": "muon_b"},
}
"""Every rule, and every other option that changes a step, as `build_optimizer` takes them."""
