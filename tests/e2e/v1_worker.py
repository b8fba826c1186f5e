"""Run LLaMA-Factory v1 several times in the same ranks: ``torchrun ... v1_worker.py cases.json``.

A case has the settings of a run. With `drop_momentum` the worker zeros the momentum before the run trains.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.trainers.sft_trainer import SFTTrainer, run_sft

fit = SFTTrainer.fit


def fit_without_momentum(self: SFTTrainer) -> None:
    for state in self.optimizer.state.values():
        if "momentum_buffer" in state:
            state["momentum_buffer"].zero_()
    fit(self)


def main(cases: dict[str, dict[str, Any]]) -> None:
    # All cases share the ranks and their mesh.
    DistributedInterface.destroy = lambda self: torch.distributed.barrier()
    for settings in cases.values():
        SFTTrainer.fit = fit_without_momentum if settings.pop("drop_momentum", False) else fit
        run_sft(settings)
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # finalizing the interpreter may make a waiting thread of gloo abort the process


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
