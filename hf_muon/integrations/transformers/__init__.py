"""`optim: muon` in transformers' TrainingArguments and Trainer."""
