"""LLaMA-Factory v1 (`USE_V1=1`): `optim_config: {name: muon, ...}`, through its own registry of optimizers."""
