"""What rules need to know of a Trainer's schedule: the number of its steps, and the peak of the learning rate."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_muon.integrations.names import mark
from hf_muon.integrations.transformers.checkpoint_files import muon_inside


def patch_schedules(trainer: Any) -> Callable[[], None]:
    """Have `Trainer.create_scheduler` tell Muon's param groups the number of training steps.

    Args:
        trainer: the class.

    Returns:
        What undoes it.
    """
    create_scheduler = trainer.create_scheduler

    @functools.wraps(create_scheduler)
    def create_and_tell(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = create_scheduler(self, num_training_steps, optimizer)
        loaded = "hf_muon.optimizer.muon" in sys.modules  # processes without Muon do not load it
        muon = muon_inside(self.optimizer if optimizer is None else optimizer) if loaded else None
        if muon is not None:
            from hf_muon.rules.momentum_schedule import fill_training_steps

            for group in muon.param_groups:
                fill_training_steps(group, num_training_steps)
            refuse_unknown_peak(muon.param_groups, scheduler)
        return scheduler

    trainer.create_scheduler = mark(create_and_tell)

    def undo() -> None:
        trainer.create_scheduler = create_scheduler

    return undo


def refuse_unknown_peak(groups: Sequence[Mapping[str, Any]], scheduler: Any) -> None:
    """Raise if weight decay follows a schedule that does not say where its peak is.

    Raises:
        RuntimeError: with the scheduler.
    """
    from hf_muon.rules.decay_schedule import PEAKS

    if any(g.get("weight_decay_schedule") == "lr" and not any(key in g for key in PEAKS) for g in groups):
        raise RuntimeError(
            f"weight_decay_schedule=lr follows the learning rate, and {type(scheduler).__name__} does not write its "
            "peak (initial_lr) into param groups. Use another lr_scheduler_type, or weight_decay_schedule=constant"
        )
