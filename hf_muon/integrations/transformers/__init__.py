"""`optim: muon` in transformers' TrainingArguments and Trainer, and the training files of both.

The folder names transformers and accelerate, and imports `ulysses` for runs with sequence parallelism. LLaMA-Factory v0
comes in through it, and `cli` reads training files with `training_file`.
"""
