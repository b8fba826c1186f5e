"""`optim: muon` in LLaMA-Factory: `v0`, the Trainer, and `v1` (`USE_V1=1`), a trainer of its own.

`v0` reaches Muon through transformers, and only adds refusals; `v1` has a registry of optimizers. The folder
imports LLaMA-Factory nowhere: its modules are handed to the functions that patch them after their own import.
`transformers.training_file` uses the refusals of both.
"""
