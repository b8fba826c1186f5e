"""Options that change a step, for tests of every layout."""

TRIPLES = ((4.0, -7.0, 3.1), (3.5, -4.8, 2.0), (2.8, -3.0, 1.2))
PLAIN = {"update_rms": 0.3, "ns_coefficients": TRIPLES}
"""Options without state."""
TOGETHER = {"momentum_warmup": 2, "normalize": "rows", "balance": "updates", "weight_decay_mode": "cautious"}
"""Every rule that goes with all others."""
