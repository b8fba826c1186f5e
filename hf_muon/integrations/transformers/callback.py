"""A callback of every Trainer: check that a Muon steps, and add Muon's metrics to the logs."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from hf_muon._autoload import Change
from hf_muon.diagnostics.log import first_few
from hf_muon.integrations.names import innermost, is_muon, muons_in, warn, warn_of_lost_moments

if TYPE_CHECKING:
    from torch import nn

    from hf_muon.optimizer.muon import Muon


def patch_callbacks(module: ModuleType) -> Iterator[Change]:
    """Add the callback to the default callbacks of every Trainer, before those that report logs."""
    callbacks = module.DEFAULT_CALLBACKS  # the list itself, which other packages have imported by its name
    yield callbacks, slice(len(callbacks), None), [MuonCallback]


class MuonCallback(TrainerCallback):
    """Handles Trainer's events in runs with `optim: muon`; does nothing in other runs."""

    _untrained: set[str] | None = None  # None where nobody is to be warned any more

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the optimizer is a Muon, with the moments of the checkpoint.

        Raises:
            RuntimeError: another optimizer would step.
        """
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
        files = "optimizer.pt, or FSDP's optimizer.bin or optimizer_0, and scheduler.pt"
        warn_of_lost_moments(muon, state.global_step, "Trainer", files)
        self._untrained = None if model is None else _untrained(model, muon)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the logs into the metrics' file; add the summary of Muon's metrics to those that hold a loss.

        Warn of parameters that have become trainable since the training began.
        """
        if not is_muon(getattr(args, "optim", None)):
            return
        muon = innermost(kwargs.get("optimizer"))
        if self._untrained is not None and (late := sorted(_untrained(kwargs["model"], muon) - self._untrained)):
            self._untrained = None
            warn(
                f"{first_few(late)} have become trainable since the optimizer was built, which does not step them: "
                "they stay as they are. Build it with all layers trainable and freeze them when training begins "
                "(on_train_begin of a callback): Muon leaves parameters without a gradient alone [unfrozen-later]"
            )
        metrics = getattr(muon, "metrics", None)
        if logs is None or metrics is None:
            return
        summary = metrics.pop_summary() if "loss" in logs else {}
        metrics.record_log(state.global_step, logs)
        logs.update(summary)
        if state.log_history:  # which has a copy already
            state.log_history[-1].update(summary)


def _untrained(model: nn.Module, muon: Muon) -> set[str]:
    """Return the names of a model's trainable parameters that an optimizer does not step."""
    from hf_muon.routing.parameters import unwrapped

    stepped = {param for group in muon.param_groups for param in group["params"]} | muon.partitioned.views.keys()
    return {unwrapped(name) for name, p in model.named_parameters() if p.requires_grad and p not in stepped}
