"""Run scripts one after the other in the same processes, which import torch and transformers once.

Usage: several.py RUNS.json, alone, under torchrun, or as the script of `cpu_fsdp`. The file has a list of command lines
without `python`. The process group stays from one run to the next, and accelerate forgets everything else.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from cpu_fsdp import end, forget_accelerator


def main(runs: list[list[str]]) -> None:
    dist.destroy_process_group = lambda *args, **kwargs: dist.barrier()
    environment = dict(os.environ)
    for script, *words in runs:
        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        forget_accelerator()
        gc.collect()  # transformers keeps a weak reference to the DeepSpeed config of the last run
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    end()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
