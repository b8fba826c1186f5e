"""Runs LLaMA-Factory v1 several times in the same ranks: ``torchrun ... v1_worker.py cases.json``.

A case is the run's settings, and under `drop_momentum` whether its momentum is zeroed before it trains.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.trainers.sft_trainer import SFTTrainer, run_sft

fit = SFTTrainer.fit
destroy = DistributedInterface.destroy


def fit_without_momentum(self: SFTTrainer) -> None:
    for state in self.optimizer.state.values():
        if "momentum_buffer" in state:
            state["momentum_buffer"].zero_()
    fit(self)


def main(cases: dict[str, dict[str, Any]]) -> None:
    # The ranks and their mesh serve all cases.
    DistributedInterface.destroy = lambda self: torch.distributed.barrier()
    for settings in cases.values():
        SFTTrainer.fit = fit_without_momentum if settings.pop("drop_momentum", False) else fit
        run_sft(settings)
    destroy(DistributedInterface())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
