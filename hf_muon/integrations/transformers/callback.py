"""A callback that every Trainer has: it checks that a Muon steps, and puts Muon's metrics into what is logged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from transformers.trainer_callback import TrainerCallback

from hf_muon._autoload import Change
from hf_muon.diagnostics.log import is_rank_zero, logger
from hf_muon.integrations.names import innermost, is_muon, muons_in


def patch_callbacks(module: ModuleType) -> Iterator[Change]:
    """Add the callback to those that every Trainer begins with, before the ones that report logs."""
    callbacks = module.DEFAULT_CALLBACKS  # the list itself, which other packages have imported by its name
    yield callbacks, slice(len(callbacks), None), [MuonCallback]


class MuonCallback(TrainerCallback):
    """What a run with `optim: muon` needs of Trainer's events; others pass through untouched."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Check that it is a Muon that steps, with the moments of the checkpoint."""
        if not is_muon(args.optim) or optimizer is None:
            return
        muon = innermost(optimizer)
        if not muons_in([muon]):
            refuse_other_optimizer(args.optim, muon)
        if state.global_step and not any(group["step"] for group in muon.param_groups):
            warn_of_fresh_moments()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add Muon's metrics to the logs that later callbacks and trainer_state.json get."""
        if logs is None:
            return
        if is_muon(args.optim):
            add_metrics(state, logs, kwargs.get("optimizer"), kwargs.get("model"))


def refuse_other_optimizer(optim: Any, optimizer: Any) -> None:
    """Raise where something else than a Muon would step.

    Raises:
        RuntimeError: with the optimizer.
    """
    kind = type(optimizer)
    raise RuntimeError(
        f"optim: {getattr(optim, 'value', optim)} was asked for, and {kind.__module__}.{kind.__qualname__} would step. "
        "Do not hand Trainer an optimizer of your own, and remove options that choose another one; or remove optim"
    )


def warn_of_fresh_moments() -> None:
    """Log on rank 0 that a run was resumed without its moments, which Trainer does not mention."""
    if is_rank_zero():
        logger().warning(
            "the moments start from zero: Trainer has loaded no optimizer state from the checkpoint (it needs "
            "optimizer.pt, or FSDP's optimizer.bin or optimizer_0, and scheduler.pt). The run differs from one that "
            "was not interrupted"
        )


def add_metrics(state: Any, logs: dict[str, Any], optimizer: Any, model: Any) -> None:
    """Add the summary of Muon's metrics to logs that hold a loss, and write the logs into the metrics' file.

    Does nothing where metrics are off.
    """
    metrics = getattr(innermost(optimizer), "metrics", None)
    if metrics is None:
        return
    summary = metrics.pop_summary() if "loss" in logs else {}
    tokens = _tokens(state, model) if "loss" in logs else None
    metrics.record_log(state.global_step, logs if tokens is None else {**logs, "tokens": tokens})
    logs.update(summary)
    if state.log_history:  # which has a copy already
        state.log_history[-1].update(summary)


def _tokens(state: Any, model: Any) -> int | None:
    """Return the tokens, padding among them, that all ranks have trained on; None where Trainer does not count them.

    Trainer counts six FLOPs for each token and each weight outside of the embeddings.
    """
    count = getattr(model, "num_parameters", None)
    per_token = 6 * count(exclude_embeddings=True) if count is not None else 0
    tokens = state.total_flos / per_token if per_token else 0.5
    # Another number is of a Trainer that counts in another way.
    return round(tokens) if math.isclose(tokens, round(tokens), rel_tol=1e-9) else None
