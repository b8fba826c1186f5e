"""LLaMA-Factory v0: what would silently replace `optim: muon` is refused."""
