"""Average gradients under sequence parallelism so that they equal those of one process, in every ZeRO stage.

transformers gathers the losses of the ranks that share a sequence with a differentiable gather, so the plain
mean of all ranks' gradients is right. DeepSpeed divides their sum by the ranks over `sequence_parallel_size`, except on
ZeRO-3's usual path. With the attribute at 1 it divides by the number of ranks on every path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_muon.optimizer.muon import Muon

GATHERED = "_hf_muon_loss_is_gathered"
"""An attribute of engines whose ranks share sequences: whether a Trainer has computed a loss with them."""


def average_over_all_ranks(engine: Any, optimizer: Muon) -> None:
    """Make an engine average gradients over all ranks, if they share sequences, and expect gathered losses.

    Raises:
        RuntimeError: a DeepSpeed that divides by something else.
    """
    if not hasattr(getattr(engine, "mpu", None), "initialize_sequence_parallel"):
        return
    for holder in (engine, engine.optimizer) if engine.zero_optimization() else (engine,):
        if not hasattr(holder, "sequence_parallel_size"):
            raise RuntimeError(
                f"this DeepSpeed's {type(holder).__name__} has no sequence_parallel_size, so that nobody knows by what "
                "it divides gradients under sequence parallel. Train without it, or with a tested version "
                "[unknown-sp-gradients]"
            )
        holder.sequence_parallel_size = 1
    setattr(engine, GATHERED, False)

    def refuse_other_losses(*_: Any) -> None:
        if not getattr(engine, GATHERED):
            raise RuntimeError(
                "Muon runs with DeepSpeed's sequence parallel only where transformers' Trainer.compute_loss computes "
                "the loss, which gathers it over the ranks that share a sequence; it was not called. A Trainer with a "
                "compute_loss of its own must call super().compute_loss; a loop of your own is not supported "
                "[loss-not-gathered]"
            )

    optimizer.register_step_pre_hook(refuse_other_losses)


def noting(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Trainer.compute_loss` to record that the losses of an engine are gathered."""

    @functools.wraps(compute_loss)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        if hasattr(model, GATHERED) and self.model.training:
            if self.compute_loss_func is not None:
                raise RuntimeError(
                    "compute_loss_func is ignored under sequence parallel. Override compute_loss [ignored-loss-func]"
                )
            setattr(model, GATHERED, True)
        return compute_loss(self, *args, **kwargs)

    return noted
