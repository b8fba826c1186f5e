"""Ulysses sequence parallelism (DeepSpeed's ALST) under transformers' Trainer: gradients, data and resume.

Each rank of a sequence parallel group holds a part of every sequence; attention exchanges it for a part of the heads
(Jacobs et al. 2023, arXiv:2309.14509; Bekman et al. 2025, arXiv:2506.13996). The folder names transformers, accelerate
and DeepSpeed, and is used by their integrations.
"""
