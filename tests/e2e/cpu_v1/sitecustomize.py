"""Lets LLaMA-Factory v1 run in several processes on a CPU; for tests alone, by putting this folder on PYTHONPATH.

It synchronizes the accelerator at the end of each step of a distributed run, and torch has no such thing on a CPU.
"""

import os

if "RANK" in os.environ:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *args, **kwargs: None
