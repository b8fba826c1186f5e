"""A callback of every Trainer: check that a Muon steps, and add Muon's metrics to the logs."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from hf_muon._autoload import Change
from hf_muon.diagnostics.log import first_few
from hf_muon.integrations.names import innermost, is_muon, muons_in, refuse_failed, warn, warn_of_lost_moments

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.optimizer.muon import Muon


def patch_callbacks(module: ModuleType) -> Iterator[Change]:
    """Add the callback to the default callbacks of every Trainer, before those that report logs."""
    # Trainer has no other place for callbacks that users do not pass. The list itself is changed, which other packages
    # have imported by its name.
    callbacks = module.DEFAULT_CALLBACKS
    yield callbacks, slice(len(callbacks), None), [MuonCallback]


class MuonCallback(TrainerCallback):
    """Handles Trainer's events in runs with `optim: muon`; does nothing in other runs."""

    _frozen: frozenset[str] = frozenset()  # names of parameters that the optimizer does not step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the optimizer is a Muon, with the moments of the checkpoint.

        Raises:
            RuntimeError: another optimizer would step.
        """
        # This event comes after the checkpoint is loaded, and before the first step.
        model, muon = kwargs.get("model"), innermost(kwargs.get("optimizer"))
        if not is_muon(getattr(args, "optim", None)) or muon is None:
            return
        if not muons_in([muon]):
            kind = type(muon)
            raise RuntimeError(
                f"optim: {getattr(args.optim, 'value', args.optim)} was asked for, and "
                f"{kind.__module__}.{kind.__qualname__} would step. Do not hand Trainer an optimizer of your own, and "
                "remove options that choose another one; or remove optim [other-optimizer]"
            )
        if state.global_step:
            refuse_failed("weights of checkpoints")
        files = "optimizer.pt, or FSDP's optimizer.bin or optimizer_0, and scheduler.pt"
        warn_of_lost_moments(muon, state.global_step, "Trainer", files)
        self._frozen = frozenset() if model is None else _frozen(model, muon)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the logs into the metrics' file; add the summary of Muon's metrics to those that hold a loss.

        Warn of parameters that have become trainable since the training began.
        """
        if not is_muon(getattr(args, "optim", None)):
            return
        muon = innermost(kwargs.get("optimizer"))
        if unfrozen := sorted(_trainable(kwargs["model"]) & self._frozen) if self._frozen else ():
            self._frozen = frozenset()  # warned of once
            warn(
                f"{first_few(unfrozen)} have become trainable since the optimizer was built, which does not step them: "
                "they stay as they are. Build it with all layers trainable and freeze them when training begins "
                "(on_train_begin of a callback): Muon leaves parameters without a gradient alone [unfrozen-later]"
            )
        diagnostics = getattr(muon, "diagnostics", None)
        if logs is None or diagnostics is None or not diagnostics.every:
            return
        # Evaluations and the end of training log, too: the summary waits for the next log of training.
        summary = diagnostics.pop_summary() if "loss" in logs else {}
        # The optimizer's count, not Trainer's, which counts a step that fp16 has skipped and begins again with train().
        diagnostics.record_log(max(group["step"] for group in muon.param_groups), logs)
        logs.update(summary)
        # Trainer has appended a copy of the logs before this event.
        if state.log_history:
            state.log_history[-1].update(summary)


def _frozen(model: nn.Module, muon: Muon) -> frozenset[str]:
    """Return the names of the parameters that are not trained and that an optimizer does not step.

    By name: after an evaluation FSDP2 leaves other parameters in the model than those that are stepped.
    """
    from hf_muon.routing.parameters import unwrapped

    stepped = {param for group in muon.param_groups for param in group["params"]} | muon.partitioned.views.keys()
    return frozenset(unwrapped(n) for n, p in model.named_parameters() if not (p.requires_grad or p in stepped))


def _trainable(model: nn.Module) -> set[str]:
    from hf_muon.routing.parameters import unwrapped

    return {unwrapped(name) for name, param in model.named_parameters() if param.requires_grad}
