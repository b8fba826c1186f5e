"""Ulysses sequence parallelism under transformers' Trainer."""
