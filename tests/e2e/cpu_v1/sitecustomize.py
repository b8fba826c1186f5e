"""Let LLaMA-Factory v1 run in several processes on a CPU; for tests alone, which put this folder on PYTHONPATH.

After each step of a distributed run LLaMA-Factory v1 synchronizes the accelerator. torch raises an error where there is
none, so `synchronize` does nothing here.
"""

import gc
import os

gc.set_threshold(10_000)  # as tests/startup

if "RANK" in os.environ:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *args, **kwargs: None
