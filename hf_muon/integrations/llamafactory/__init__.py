"""`optim: muon` in LLaMA-Factory: `v0` uses transformers' Trainer, `v1` (`USE_V1=1`) its own.

`v0` reaches Muon through transformers, and only adds refusals; `v1` has a registry of optimizers. The folder
does not import LLaMA-Factory: the functions that patch its modules receive them after their own import.
"""
