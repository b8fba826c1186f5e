"""Which runs share sequences among ranks, and whose gradients this folder looks after."""

from __future__ import annotations

import weakref
from typing import Any

from hf_muon.integrations.names import is_muon

CORRECTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that a Trainer has made, whose gradients `hooks.patch_trainer` corrects."""


def size_of(parallelism: Any) -> int:
    """Return the ranks that share a sequence, by accelerate's ParallelismConfig; 1 for None."""
    return int(getattr(parallelism, "sp_size", None) or 1)


def is_corrected(engine: Any) -> bool:
    """Return whether the optimizer that an engine wraps is one of `CORRECTED`."""
    wrapper = getattr(engine, "optimizer", None)
    return getattr(wrapper, "optimizer", wrapper) in CORRECTED


def is_concerned(trainer: Any) -> bool:
    """Return whether a Trainer's ranks share sequences, with Muon as its optimizer."""
    return is_muon(trainer.args.optim) and size_of(getattr(trainer.accelerator, "parallelism_config", None)) > 1
