"""`optim: muon` in LLaMA-Factory v0 and v1."""
