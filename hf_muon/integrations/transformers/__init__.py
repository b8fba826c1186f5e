"""`optim: muon` in transformers' TrainingArguments and Trainer.

The folder names transformers and accelerate, and imports `ulysses` for runs with sequence parallelism. LLaMA-Factory v0
comes in through it.
"""
