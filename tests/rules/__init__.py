"""Rules: each against a slow loop, in every layout, resumed, together."""
