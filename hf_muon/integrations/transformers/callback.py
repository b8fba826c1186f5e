"""A callback of every Trainer: check that a Muon steps, and add Muon's metrics to the logs."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from transformers.trainer_callback import TrainerCallback

from hf_muon._autoload import Change
from hf_muon.diagnostics.log import is_rank_zero, logger
from hf_muon.integrations.names import innermost, is_muon, muons_in


def patch_callbacks(module: ModuleType) -> Iterator[Change]:
    """Add the callback to the default callbacks of every Trainer, before those that report logs."""
    callbacks = module.DEFAULT_CALLBACKS  # the list itself, which other packages have imported by its name
    yield callbacks, slice(len(callbacks), None), [MuonCallback]


class MuonCallback(TrainerCallback):
    """Handles Trainer's events in runs with `optim: muon`; does nothing in other runs."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Check that the optimizer is a Muon, with the moments of the checkpoint.

        Raises:
            RuntimeError: another optimizer would step.
        """
        if not is_muon(args.optim) or optimizer is None:
            return
        muon = innermost(optimizer)
        if not muons_in([muon]):
            kind = type(muon)
            raise RuntimeError(
                f"optim: {getattr(args.optim, 'value', args.optim)} was asked for, and "
                f"{kind.__module__}.{kind.__qualname__} would step. Do not hand Trainer an optimizer of your own, and "
                "remove options that choose another one; or remove optim [other-optimizer]"
            )
        if state.global_step and not any(group["step"] for group in muon.param_groups) and is_rank_zero():
            logger().warning(
                "the moments start from zero: Trainer has loaded no optimizer state from the checkpoint (it needs "
                "optimizer.pt, or FSDP's optimizer.bin or optimizer_0, and scheduler.pt). The run differs from one "
                "that was not interrupted [no-optimizer-state]"
            )

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Write the logs into the metrics' file; add the summary of Muon's metrics to those that hold a loss."""
        metrics = getattr(innermost(optimizer), "metrics", None) if is_muon(args.optim) else None
        if logs is None or metrics is None:
            return
        summary = metrics.pop_summary() if "loss" in logs else {}
        metrics.record_log(state.global_step, logs)
        logs.update(summary)
        if state.log_history:  # which has a copy already
            state.log_history[-1].update(summary)
